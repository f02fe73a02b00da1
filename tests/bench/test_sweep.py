"""The sweep: grid and report as values, processes against small stand-ins, and once for real."""

import csv
import json
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.sweep import main
from benchmarks.sweeping.sweep_grid import pairs_of, parse_links, read_sets
from benchmarks.sweeping.sweep_report import Run, summarise, table
from quire.errors import InvalidParameter

ROOT = Path(__file__).parents[2]

SERVER = """
import http.server, json, pathlib, sys
args = {{}}
for word in sys.argv[1:]:
    if word.startswith("--"):
        name, _, args[name] = word.partition("=")
    else:
        args[name] = word
with open({log!r}, "a") as log: log.write("serve " + json.dumps(args) + "\\n")
if args.get("--breaks") == "start": sys.exit("cannot start")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(args["--port"])), Handler).serve_forever()
"""
LOAD = """
import json, pathlib, sys, time, urllib.request
args = {{}}
for word in sys.argv[1:]:
    if word.startswith("--"):
        name, _, args[name] = word.partition("=")
    else:
        args[name] = word
urllib.request.urlopen(args["--base-url"] + "/health").close()
with open({log!r}, "a") as log: log.write("load " + json.dumps(args) + "\\n")
if args.get("--breaks") == "hang": time.sleep(600)
if args.get("--breaks") == "file": sys.exit(1)
if args.get("--breaks") == "code": sys.exit(7)
failed = int(args.get("--fails", 0))
figures = {{"completed": 4, "failed": failed, "output_throughput": 100.0 * int(args.get("--x", 1)),
            "median_ttft_ms": 5.0, "median_tpot_ms": 1.0}}
pathlib.Path(args["--result-dir"], args["--result-filename"]).write_text(json.dumps(figures))
sys.exit(1 if failed else 0)
"""


class Stand:
    """Stand-ins for server and load that write what they were told to a log."""

    def __init__(self, folder):
        self.folder = folder
        self.log = folder / "log"
        for name, code in (("server.py", SERVER), ("load.py", LOAD)):
            (folder / name).write_text(code.format(log=str(self.log)))

    def words(self, *flags):
        commands = ["--serve-cmd", f"{shlex.quote(sys.executable)} {self.folder / 'server.py'}"]
        commands += ["--bench-cmd", f"{shlex.quote(sys.executable)} {self.folder / 'load.py'}"]
        return [*commands, "-o", str(self.folder), "-e", "exp", *flags]

    def run(self, *flags):
        return main(self.words(*flags))

    def calls(self, kind):
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [json.loads(x.removeprefix(kind)) for x in lines if x.startswith(kind)]

    def summary(self):
        return json.loads((self.folder / "exp" / "summary.json").read_text())


@pytest.fixture
def stand(tmp_path):
    yield Stand(tmp_path)
    here = psutil.Process()
    assert not [p for p in here.children(recursive=True) if "server.py" in " ".join(p.cmdline())]


def test_every_pair_is_run_and_told_where(stand, capsys):
    grid = ["--serve-param", "a=1,2", "--bench-param", "x=1,3", "--num-runs", "2"]
    assert stand.run(*grid) == 0
    assert [call["--a"] for call in stand.calls("serve")] == ["1", "2"]
    loads = stand.calls("load")
    assert len(loads) == 8 and {x["--base-url"] for x in loads} == {
        f"http://127.0.0.1:{stand.calls('serve')[0]['--port']}"
    }
    seeds = [x["--seed"] for x in loads]
    assert len(set(seeds[:4])) == 4 and seeds[:4] == seeds[4:]
    found = [
        (r["server"], r["load"], r["num_runs"], r["output_throughput"]) for r in stand.summary()
    ]
    assert found == [(f"a={a}", f"x={x}", 2, 100.0 * x) for a in (1, 2) for x in (1, 3)]
    out = stand.folder / "exp"
    assert (out / "summary.png").read_bytes().startswith(b"\x89PNG")
    with (out / "runs.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == 8
    assert "a=2     x=3" in capsys.readouterr().out


def test_resuming_does_only_what_is_missing(stand):
    grid = ["--serve-param", "a=1,2", "--bench-param", "x=1,3", "--num-runs", "1"]
    assert stand.run(*grid) == 0
    whole = stand.summary()
    assert stand.run(*grid) == 2  # it is not overwritten
    [lost] = (stand.folder / "exp").glob("a=2-*/x=3-*/run-0.json")
    lost.write_text('{"completed": 4, "fai')
    assert stand.run(*grid, "--resume") == 0
    assert len(stand.calls("serve")) == 3 and len(stand.calls("load")) == 5
    assert stand.summary() == whole
    assert stand.run(*grid, "--resume") == 0
    assert len(stand.calls("serve")) == 3
    assert stand.run(*grid[:-1], "2", "--resume", "--bench-param", "y=8") == 0
    assert len(stand.calls("load")) == 5 + 8


@pytest.mark.parametrize(
    ("flags", "num_results", "part"),
    [
        (["--serve-param", "breaks=start,no"], 1, "ended with code 1; "),
        (["--bench-param", "breaks=file,no"], 1, "no result"),
        (["--bench-param", "breaks=code,no"], 1, "ended with code 7"),
        (["--bench-param", "fails=2,0"], 2, " 2 "),
        (["--after-bench-cmd", "false"], 1, "ended with code 1"),
        (["--serve-cmd", "/no/such/program"], 0, "No such file"),
    ],
    ids=str,
)
def test_a_failure_costs_only_its_part_and_is_told(stand, flags, num_results, part, capsys):
    assert stand.run(*flags, "--num-runs", "1") == 1
    seen = capsys.readouterr()
    assert part in seen.out + seen.err
    assert sum(row["num_runs"] for row in stand.summary()) == num_results


def test_a_server_that_is_there_already_is_not_measured(stand, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        words = stand.words("--num-runs", "1")
        words[words.index("--serve-cmd") + 1] += f" --port {port}"
        assert main(words) == 1
        thread.join()
    assert "Another server answers" in capsys.readouterr().err
    assert not stand.calls("serve")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_leaves_no_server_behind(stand, number):
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.sweep", *stand.words("--bench-param", "breaks=hang")],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        while not stand.calls("load"):
            assert process.poll() is None
            time.sleep(0.01)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert not [child for child in children if child.is_running()]


def test_dry_run_prints_commands_and_leaves_nothing(stand, capsys):
    assert stand.run("--dry-run", "--serve-param", "flag=true,false", "--bench-param", "x=1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and lines[0].endswith("--flag") and lines[4].endswith("--no-flag")
    assert "--x=1 --base-url" in lines[1]
    assert not (stand.folder / "exp").exists() and not stand.log.exists()


def sets_of(tmp_path, text, *pairs, suffix=".json"):
    file = tmp_path / f"sets{suffix}"
    file.write_text(text)
    return read_sets("--bench-params", file, pairs)


def test_files_of_sets(tmp_path):
    made = sets_of(tmp_path, '[{"a-b": 1}, {"_benchmark_name": "n", "c": [1, [2, 3]]}]', "d=x,inf")
    assert [(one.name, one.words()) for one in made] == [
        ("a_b=1, d=x", ["--a-b=1", "--d=x"]),
        ("a_b=1, d=inf", ["--a-b=1", "--d=inf"]),
        ("n c=1, d=x", ["--c=1", "--d=x"]),
        ("n c=1, d=inf", ["--c=1", "--d=inf"]),
        ("n c=[2, 3], d=x", ["--c", "2", "3", "--d=x"]),
        ("n c=[2, 3], d=inf", ["--c", "2", "3", "--d=inf"]),
    ]
    named = sets_of(tmp_path, "slow:\n  rate: 1\nfast:\n  rate: .inf\n", suffix=".yaml")
    assert [(one.name, one.words()) for one in named] == [
        ("slow", ["--rate=1"]), ("fast", ["--rate=inf"])
    ]  # fmt: skip
    assert [one.name for one in read_sets("--bench-params", None, ())] == ["default"]


@pytest.mark.parametrize(
    ("text", "pairs", "part"),
    [
        ("[", (), "Expecting"),
        ("[]", (), "list of objects"),
        ("7", (), "list of objects"),
        ("[3]", (), "an object of names"),
        ('{"a": 1}', (), "an object of names"),
        ('[{"a": 1}, {"a": 1}]', (), "two sets"),
        ('[{"a": 1}]', ("a=2",), "as well"),
        ('[{"a": 1}]', ("b",), "NAME=VALUE"),
    ],
)
def test_anything_but_a_grid_is_refused(tmp_path, text, pairs, part):
    with pytest.raises(InvalidParameter, match=part):
        sets_of(tmp_path, text, *pairs)


def test_linked_names_go_together():
    served = read_sets("--serve-params", None, ("s=1,2,9",))
    sent = read_sets("--bench-params", None, ("x=1,2", "y=5,6"))
    plan = [(a.name, [b.name for b in bs]) for a, bs in pairs_of(served, sent, parse_links("s=x"))]
    assert plan == [("s=1", ["x=1, y=5", "x=1, y=6"]), ("s=2", ["x=2, y=5", "x=2, y=6"])]
    with pytest.raises(InvalidParameter, match="no such parameter"):
        list(pairs_of(served, sent, parse_links("s=z")))
    with pytest.raises(InvalidParameter, match="NAME=NAME"):
        parse_links("s")


def test_folders_tell_commands_and_values_apart():
    one, other = read_sets("--bench-params", None, ("a=1,2",))
    names = {one.folder(["x"]), one.folder(["y"]), other.folder(["x"])}
    assert len(names) == 3 and one.folder(["x"]) in names
    [odd] = read_sets("--bench-params", None, ("a=../../" + "b" * 300,))
    assert "/" not in odd.folder([]) and len(odd.folder([])) < 100


def test_means_and_sums():
    runs = [Run("s", "l", n, {"failed": n, "output_throughput": 10.0 * n}) for n in range(3)]
    [row] = summarise(runs)
    assert (row["failed"], row["output_throughput"], row["num_runs"]) == (3, 10.0, 3)
    assert table([row]).splitlines()[1].split() == ["s", "l", "3", "-", "10.00", *"----"]


@pytest.mark.full
@pytest.mark.slow
def test_for_real(tmp_path):
    serve = "quire serve --kv-cache-memory-bytes 64M --dtype float32"
    bench = "quire bench serve --num-prompts 4 --input-len 8 --output-len 4 --disable-tqdm"
    words = ["--serve-cmd", serve, "--bench-cmd", bench, "--bench-param", "max-concurrency=1,2"]
    words += ["--serve-param", "max-num-seqs=2", "--num-runs", "1", "-o", str(tmp_path), "-e", "x"]
    assert main(words) == 0
    rows = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert [(row["completed"], row["total_output_tokens"]) for row in rows] == [(4, 16.0)] * 2
