"""Counts how JSON schemas are enforced: those of generators, and JSON Schema's own test suite.

    pip download --no-deps --no-binary :all: jsonschema -d /tmp/suite
    PYTHONPATH=src:. python tools/schema_table.py --suite /tmp/suite/jsonschema-*.tar.gz

The suite is in the source distribution of jsonschema; a folder with its drafts is taken too. Its
objects are open, as in the standard, and formats are asserted: in place of the file that takes them
for annotations, the optional ones of the formats that are enforced count. `--random N` adds random
schemas of the keywords that combine, with random values that jsonschema has judged. What is counted
is said in tests/grammar/json_schema/verdicts.py; `--show KIND` lists the schemas of a kind. Ends
with 1 if one is late or wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import jsonschema

from quire.config.structured_outputs_config import structured_outputs_config
from quire.errors import InvalidParameter
from quire.grammar.json_schema.keywords import FORMATS
from quire.grammar.trial import GrammarTrials
from quire.params import StructuredOutputsParams
from tests.grammar.json_schema.random_schemas import judged_schema
from tests.grammar.json_schema.verdicts import KINDS, SOURCE, Judge, Verdict

GENERATED = Path("tests/grammar/json_schema/generated_schemas.json")
DRAFTS = {
    "draft2020-12": (
        "https://json-schema.org/draft/2020-12/schema",
        jsonschema.Draft202012Validator,
    ),
    "draft2019-09": (
        "https://json-schema.org/draft/2019-09/schema",
        jsonschema.Draft201909Validator,
    ),
    "draft7": ("http://json-schema.org/draft-07/schema#", jsonschema.Draft7Validator),
}


@dataclass(frozen=True)
class Case:
    """A schema with values that follow it and values that do not. `table`: the row that it counts
    in; `is_open`: see `Judge.verdict`.
    """

    table: str
    name: str
    schema: dict[str, Any]
    valid: list[Any]
    invalid: list[Any]
    is_open: bool
    validator: type


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--suite", type=Path, help="the source distribution, or a folder of drafts")
    parser.add_argument("--random", type=int, default=0, help="how many random schemas, too")
    parser.add_argument("--backend", default="guidance", choices=("guidance", "xgrammar"))
    parser.add_argument("--show", action="append", default=[], choices=KINDS)
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # of keywords that are not enforced, which are counted here
    of_suite = suite(args.suite) if args.suite else ()
    cases = chain(generated(), of_suite, map(random_case, range(args.random)))
    counts: dict[str, Counter[str]] = {}
    judge = Judge.of(args.backend)
    trials = GrammarTrials(SOURCE, structured_outputs_config({"backend": args.backend}))
    for case in cases:
        found = verdict(judge, trials, case)
        counts.setdefault(case.table, Counter())[found.kind] += 1
        if found.kind in args.show or found.kind in ("late", "wrong"):
            print(f"{found.kind}: {case.table}: {case.name}: {found.why}")
    trials.close()
    print_table(counts)
    sys.exit(any(count["late"] or count["wrong"] for count in counts.values()))


def verdict(judge: Judge, trials: GrammarTrials, case: Case) -> Verdict:
    """Judge a schema that is admitted; admission has its limits of time."""
    form = StructuredOutputsParams(json=case.schema, allow_additional_properties=case.is_open)
    try:
        trials.check(form)
    except InvalidParameter as error:
        return Verdict("refused", str(error))
    judge = Judge(judge.vocabulary, judge.libraries, case.validator)
    return judge.verdict(case.schema, case.valid, case.invalid, is_open=case.is_open)


def generated() -> Iterator[Case]:
    """The schemas of generators, whose objects are closed."""
    for name, case in json.loads(GENERATED.read_text()).items():
        table = name.partition(":")[0].rstrip(" 0123456789")
        schema, valid, invalid = case["schema"], case["valid"], case["invalid"]
        yield Case(table, name, schema, valid, invalid, False, jsonschema.Draft202012Validator)


def suite(path: Path) -> Iterator[Case]:
    """The groups of the suite's drafts, each a schema."""
    for draft, (uri, validator) in DRAFTS.items():
        for file, groups in files_of(path, draft):
            for group in groups:
                name = f"{draft}/{file}: {group['description']}"
                schema = with_draft(group["schema"], uri)
                valid = [test["data"] for test in group["tests"] if test["valid"]]
                invalid = [test["data"] for test in group["tests"] if not test["valid"]]
                table = f"suite, {draft}{', formats' if file.startswith('optional') else ''}"
                yield Case(table, name, schema, valid, invalid, True, validator)


def random_case(seed: int) -> Case:
    """A random schema, judged by jsonschema."""
    schema, valid, invalid = judged_schema(seed)
    return Case("random", str(seed), schema, valid, invalid, True, jsonschema.Draft202012Validator)


def with_draft(schema: Any, uri: str) -> dict[str, Any]:
    """A schema of the suite as an object that says its draft."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return {"$schema": uri, **schema}


def files_of(path: Path, draft: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The files of a draft that count, by their names."""
    if path.is_dir():
        for file in sorted((path / draft).rglob("*.json")):
            if (name := counted_name(file, draft)) is not None:
                yield name, json.loads(file.read_text())
        return
    with tarfile.open(path) as archive:
        for member in sorted(archive.getnames()):
            if "/json/tests/" in member and (name := counted_name(Path(member), draft)) is not None:
                found = archive.extractfile(member)
                assert found is not None
                yield name, json.load(found)


def counted_name(file: Path, draft: str) -> str | None:
    """The name of a file of the suite; None: it does not count in this draft."""
    if file.suffix != ".json":
        return None
    if file.parent.name == draft and file.stem != "format":
        return file.stem
    is_format = file.parts[-4:-1] == (draft, "optional", "format") and file.stem in FORMATS
    return f"optional/{file.stem}" if is_format else None


def print_table(counts: dict[str, Counter[str]]) -> None:
    """Print the counts as Markdown."""
    print(f"| schemas | all | {' | '.join(KINDS)} |")
    print(f"| --- | {' | '.join(['---'] * (len(KINDS) + 1))} |")
    for table, count in counts.items():
        row = (str(count[kind]) for kind in KINDS)
        print(f"| {table} | {count.total()} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
