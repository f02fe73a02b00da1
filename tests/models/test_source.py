"""Finding a model: a folder, or the hub, which a stand-in plays here."""

import huggingface_hub
import pytest
from huggingface_hub import errors

from quire.errors import ModelNotFound
from quire.models.loading.source import locate


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


@pytest.mark.parametrize("what", ["config", "tokenizer", "weights", "all"])
def test_code_and_pickles_are_never_downloaded(tmp_path, monkeypatch, what):
    hub = Hub(monkeypatch, tmp_path)
    locate("owner/name", what=what)
    files = huggingface_hub.utils.filter_repo_objects(
        [
            *("config.json", "tokenizer.json", "model.safetensors", "modeling_evil.py"),
            *("pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors"),
        ],
        allow_patterns=hub.calls[0]["allow_patterns"],
        ignore_patterns=hub.calls[0]["ignore_patterns"],
    )
    wanted = set(files)
    assert "config.json" in wanted
    assert wanted <= {"config.json", "tokenizer.json", "model.safetensors"}
    assert ("model.safetensors" in wanted) == (what in ("weights", "all"))


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
    "bad id": (errors.HFValidationError, "no valid hub id"),
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
