"""Finding a model: a folder, or the hub, which a stand-in plays here."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from quire.errors import AdapterNotFound, ModelNotFound
from quire.models.loading.source import locate, locate_adapter


class Hub:
    """Stands in for `snapshot_download`: records the call, answers with a folder or an error."""

    def __init__(self, monkeypatch, answer):
        self.answer, self.calls = answer, []
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def download(self, repo, **keywords):
        self.calls.append({"repo": repo, **keywords})
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def test_a_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    hub = Hub(monkeypatch, tmp_path)
    assert locate(str(tmp_path)) == tmp_path
    assert locate(tmp_path, revision="main", what="weights") == tmp_path
    assert not hub.calls


def test_a_hub_id_is_downloaded(tmp_path, monkeypatch):
    hub = Hub(monkeypatch, tmp_path)
    found = locate("owner/name", revision="v2", token="secret", download_dir="/cache")
    assert found == tmp_path
    call = hub.calls[0]
    assert (call["repo"], call["revision"], call["token"]) == ("owner/name", "v2", "secret")
    assert call["cache_dir"] == "/cache"


REPOSITORY = [
    *("config.json", "params.json", "tokenizer.json", "tekken.json", "tokenizer.model.v3"),
    *("model.safetensors", "consolidated.safetensors", "original/model.safetensors"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "original/weights.pth"),
    *("modeling_evil.py", "handler.sh"),
]
TOKENIZER = {"tokenizer.json", "tekken.json", "tokenizer.model.v3"}
MISTRALS = {"params.json", "consolidated.safetensors"}


def fetched(call, files):
    """What of a repository's files a call of snapshot_download takes."""
    keys = ("allow_patterns", "ignore_patterns")
    return set(huggingface_hub.utils.filter_repo_objects(files, **{key: call[key] for key in keys}))


@pytest.mark.parametrize(
    ("what", "load_format", "wanted"),
    [
        ("config", "safetensors", set()),
        ("tokenizer", "safetensors", TOKENIZER),
        ("weights", "safetensors", {"model.safetensors"}),
        ("weights", "runai_streamer", {"model.safetensors"}),
        ("weights", "pt", {"pytorch_model.bin", "pytorch_model.bin.index.json"}),
        ("weights", "mistral", MISTRALS),
        ("all", "safetensors", {*TOKENIZER, "model.safetensors"}),
        ("all", "mistral", {*TOKENIZER, *MISTRALS}),
    ],
)
def test_only_what_is_read_is_downloaded(tmp_path, monkeypatch, what, load_format, wanted):
    hub = Hub(monkeypatch, tmp_path)
    locate("owner/name", what=what, load_format=load_format)
    [call] = hub.calls
    assert fetched(call, REPOSITORY) == {"config.json", *wanted}


@pytest.mark.parametrize(
    ("stored", "times"), [("model.safetensors", 1), ("consolidated.safetensors", 2), ("x.bin", 3)]
)
def test_other_formats_are_fetched_where_there_is_no_first_choice(
    tmp_path, monkeypatch, stored, times
):
    hub = Hub(monkeypatch, tmp_path)
    download = hub.download

    def fetch(repo, **keywords):
        for name in fetched(keywords, [stored]):
            (tmp_path / name).touch()
        return download(repo, **keywords)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    locate("owner/name", what="weights")
    assert len(hub.calls) == times and (tmp_path / stored).exists()


def response_error(kind):
    error = kind.__new__(kind)
    Exception.__init__(error, "no")
    return error


FAILURES = {
    "no repository": (errors.RepositoryNotFoundError, "neither a folder here nor on the hub"),
    "no revision": (errors.RevisionNotFoundError, "at revision v9 was not found: .*no such rev"),
    "gated": (errors.GatedRepoError, "pass hf_token"),
    "offline": (errors.OfflineModeIsEnabled, "offline mode is on"),
    "no network": (errors.LocalEntryNotFoundError, "cannot be reached"),
    "bad id": (errors.HFValidationError, "not a valid hub id"),
    "anything": (ConnectionResetError, "could not be fetched: ConnectionResetError"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_every_failure_of_the_hub_is_one_sentence(monkeypatch, case):
    kind, text = FAILURES[case]
    Hub(monkeypatch, response_error(kind))
    with pytest.raises(ModelNotFound, match=text) as caught:
        locate("owner/name", revision="v9")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["./here", "/no/such/folder", "a/b/c", "~/models/x", "", "x/"])
def test_a_path_that_is_not_there_does_not_reach_the_hub(tmp_path, monkeypatch, name):
    hub = Hub(monkeypatch, tmp_path)
    with pytest.raises(ModelNotFound, match="There is no folder"):
        locate(name)
    assert not hub.calls


def test_a_file_is_not_taken_for_a_missing_folder(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"model\.gguf' is a file\. Give the folder"):
        locate(tmp_path / "model.gguf")


def test_an_adapter_is_a_folder_or_the_files_of_a_repository(tmp_path, monkeypatch):
    hub = Hub(monkeypatch, tmp_path)
    assert locate_adapter(tmp_path / "none") == tmp_path / "none" and not hub.calls
    assert locate_adapter(Path("owner/name")) == tmp_path
    [call] = hub.calls
    files = ["adapter_config.json", "adapter_model.bin", "adapter_model.safetensors"]
    assert call["repo"] == "owner/name"
    assert fetched(call, [*files, "model.safetensors", "run.py", "optimizer.pt"]) == set(files)


def test_an_adapter_that_neither_is_says_both(monkeypatch):
    Hub(monkeypatch, response_error(errors.LocalEntryNotFoundError))
    with pytest.raises(AdapterNotFound, match="no folder 'owner/name'.*hub cannot be reached"):
        locate_adapter(Path("owner/name"))
