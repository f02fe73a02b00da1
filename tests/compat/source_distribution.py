"""Fetches a source distribution of the registry, whose digest is known."""

import hashlib
import json
import tarfile
import urllib.request

JSON = {"Accept": "application/vnd.pypi.simple.v1+json"}


def fetch(folder, project, archive, digest, within=""):
    """The unpacked folder of `archive` (`NAME-VERSION.tar.gz`) in `folder`; `within`: only what is
    below that path of it.
    """
    source = folder / archive.removesuffix(".tar.gz")
    if not source.is_dir():
        file = folder / archive
        if not file.exists():
            asked = urllib.request.Request(f"https://pypi.org/simple/{project}/", headers=JSON)
            with urllib.request.urlopen(asked) as reply:
                files = json.load(reply)["files"]
            [url] = [found["url"] for found in files if found["filename"] == archive]
            with urllib.request.urlopen(url) as reply:
                file.write_bytes(reply.read())
        if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise SystemExit(f"{file} is not the file that was known")
        with tarfile.open(file) as opened:
            members = [
                member for member in opened if member.name.startswith(f"{source.name}/{within}")
            ]
            opened.extractall(folder, members, filter="data")
    return source
