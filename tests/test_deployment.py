"""Flags, routes and metrics that the files of deploy/ name are there, and their schemas hold."""

import os
import re
import shlex

import pytest
import yaml

from quire.cli import serve
from quire.config.args.command_line import QuireParser
from quire.config.args.server_args import ServerArgs
from quire.engine.stats.catalog import DESCRIPTIONS
from quire.environment import VARIABLES
from tests.house.package import ROOT

DEPLOY = ROOT / "deploy"
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
UNIT = (DEPLOY / "quire.service").read_text()
OF_OTHERS = {"HOME", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "HF_HOME", "TRITON_CACHE_DIR",
             "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "POD_IP", "RANK"}  # fmt: skip


def documents(path):
    return list(yaml.safe_load_all(path.read_text()))


def pods():
    """Every pod's template, with the name of what makes it."""
    for path in MANIFESTS:
        for document in documents(path):
            if "template" in document.get("spec", {}):
                yield pytest.param(
                    document["spec"]["template"]["spec"], id=document["metadata"]["name"]
                )


def options_of(words):
    command, *rest = words
    assert command == "serve"
    parser = QuireParser()
    serve.add_arguments(parser)
    return parser.parse_args(rest)


def words_of(container):
    """The command of a container, with the variables of one pod."""
    variables = {"$(RANK)": "1", "$(POD_IP)": "10.0.0.1"}
    return [re.sub(r"\$\(\w+\)", lambda m: variables[m[0]], word) for word in container["args"]]


def test_there_are_files():
    assert [path.name for path in MANIFESTS] == [
        "autoscaling.yaml", "many_machines.yaml", "server.yaml"
    ]  # fmt: skip


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
@pytest.mark.parametrize("release", ["1.33", "1.37"])
def test_manifests_have_the_schema_of_kubernetes(path, release):
    validate = pytest.importorskip("kubernetes_validate")
    for document in documents(path):
        validate.validate(document, release, strict=True)


@pytest.mark.parametrize("pod", list(pods()))
def test_pods_need_no_root_and_write_nowhere_else(pod):
    [container] = pod["containers"]
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == 10001
    assert not pod["automountServiceAccountToken"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"/cache", "/tmp"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


@pytest.mark.parametrize("pod", list(pods()))
def test_pods_have_time_to_drain(pod):
    [container] = pod["containers"]
    options = options_of(words_of(container))
    if options.headless:
        return
    waits = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > waits + options.shutdown_timeout + 5
    probes = {
        name: container[f"{name}Probe"]["httpGet"]["path"]
        for name in ("startup", "liveness", "readiness")
    }
    assert probes == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
    [port] = [each for each in container["ports"] if each["name"] == "http"]
    assert port["containerPort"] == ServerArgs().port


def test_cores_of_many_machines_are_all_there():
    sets = [each for each in documents(MANIFESTS[1]) if each["kind"] == "StatefulSet"]
    by_name = {each["metadata"]["name"]: each for each in sets}
    cores = by_name["quire-core"]["spec"]
    sizes = set()
    for name in ("quire-front", "quire-core"):
        [container] = by_name[name]["spec"]["template"]["spec"]["containers"]
        options = options_of(words_of(container))
        sizes.add(options.data_parallel_size)
        assert options.data_parallel_size_local == 1
    assert sizes == {cores["replicas"] + 1}
    assert cores["ordinals"] == {"start": 1}


def test_metrics_that_scale_are_exported():
    [scaler, rules] = documents(MANIFESTS[0])
    rules = yaml.safe_load(rules["data"]["rules.yaml"])["rules"]
    exported = {f"vllm:{name}" for name in DESCRIPTIONS}
    asked = {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
    assert asked == {rule["name"]["as"] for rule in rules}
    for rule in rules:
        assert rule["seriesQuery"].partition("{")[0] in exported


def test_variables_that_are_set_are_read():
    known = {variable.name for variable in VARIABLES} | OF_OTHERS
    blocks = re.findall(r"^ENV ((?:.*\\\n)*.*)", CONTAINERFILE, re.M)
    named = {
        word.partition("=")[0] for block in blocks for word in block.replace("\\\n", " ").split()
    }
    named |= {w.partition("=")[0] for w in re.findall(r"^Environment=(.*)", UNIT, re.M)[0].split()}
    for path in MANIFESTS:
        named |= set(re.findall(r"- name: ([A-Z_]+)$", path.read_text(), re.M))
    assert named - {"", "\n"} <= known


def test_the_commands_of_unit_and_image_are_ours():
    [command] = re.findall(r"^ExecStart=/opt/quire/bin/quire (.*)", UNIT, re.M)
    assert options_of(shlex.split(command)).config == "/etc/quire/quire.yaml"
    [words] = re.findall(r"^CMD (.*)", CONTAINERFILE, re.M)
    assert options_of(yaml.safe_load(words)).host == "0.0.0.0"
    stop_s = int(re.findall(r"^TimeoutStopSec=(\d+)", UNIT, re.M)[0])
    assert stop_s > ServerArgs().shutdown_timeout + 5


def test_the_image_has_the_range_of_torch_that_the_package_has():
    [needed] = re.findall(r'^  "(torch[^"]*)",', (ROOT / "pyproject.toml").read_text(), re.M)
    assert re.findall(r'"(torch[^"]*)"', CONTAINERFILE) == [needed] * 2


def test_what_is_copied_into_the_image_exists():
    for words in re.findall(r"^COPY (?!--from)(.*)", CONTAINERFILE, re.M):
        *sources, _ = words.split()
        assert all(os.path.exists(ROOT / source) for source in sources)
    assert CONTAINERFILE.count("USER 10001:10001") == 2
