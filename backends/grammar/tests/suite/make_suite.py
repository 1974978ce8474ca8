"""The JSON Schema Test Suite in four small files: `make_suite.py FOLDER`, the suite's `tests` folder.

PyPI's source package of `jsonschema` has it: `pip download --no-deps --no-binary :all: jsonschema==4.26.0`, then `json/tests` in it. Each line of a
file is a group of tests: keyword (the suite's file), description, schema, instances with whether they are valid. The descriptions of single
instances are left out.
"""

import gzip
import json
import pathlib
import sys

DRAFTS = ["draft2020-12", "draft2019-09", "draft7", "draft4"]


def lines(folder: pathlib.Path):
    for path in sorted(folder.rglob("*.json"), key=lambda path: (len(path.relative_to(folder).parts), path)):
        keyword = path.relative_to(folder).with_suffix("").as_posix()
        for group in json.loads(path.read_text()):
            instances = [[test["data"], test["valid"]] for test in group["tests"]]
            line = [keyword, group["description"], group["schema"], instances]
            yield json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"


for draft in DRAFTS:
    text = "".join(lines(pathlib.Path(sys.argv[1]) / draft))
    (pathlib.Path(__file__).parent / f"{draft}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
