"""Functions of Python's standard library by what their docstrings say, and questions about them.

The texts and the questions are in plain English, and none of them was written for a model: a
wrong vector puts another function in front.
"""

import importlib
import inspect

MODULES = (
    *("bisect", "calendar", "collections", "copy", "csv", "difflib", "filecmp", "fnmatch"),
    *("fractions", "functools", "getpass", "glob", "gzip", "hashlib", "heapq", "html", "inspect"),
    *("itertools", "json", "keyword", "linecache", "locale", "math", "mimetypes", "operator"),
    *("os", "os.path", "pickle", "platform", "pprint", "random", "re", "secrets", "shlex"),
    *("shutil", "signal", "socket", "statistics", "string", "struct", "subprocess", "tempfile"),
    *("textwrap", "threading", "time", "timeit", "tokenize", "traceback", "types", "unicodedata"),
    *("urllib.parse", "uuid", "warnings", "weakref", "webbrowser", "zlib"),
)  # fmt: skip
METHODS = (str, list, dict, set)

QUESTIONS = {
    "how do I remove leading whitespace from all lines of a text": {"textwrap.dedent"},
    "break a long paragraph into lines of a given width": {"textwrap.wrap", "textwrap.fill"},
    "what is the greatest common divisor of two numbers": {"math.gcd"},
    "delete a directory and everything in it": {"shutil.rmtree"},
    "the n largest items of a list": {"heapq.nlargest"},
    "is this year a leap year": {"calendar.isleap"},
    "how long does this piece of code take to run": {"timeit.timeit", "timeit.repeat"},
    "a decorator that remembers the results of recent calls": {
        "functools.lru_cache",
        "functools.cache",
    },
    "ask the user for a password without showing it": {"getpass.getpass"},
    "guess the file type of a URL from its extension": {"mimetypes.guess_type"},
    "turn a string of JSON into Python objects": {"json.loads"},
    "the middle value of a list of measurements": {"statistics.median"},
    "the most common value in the data": {"statistics.mode", "statistics.multimode"},
    "mix up the order of a list at random": {"random.shuffle"},
    "split a command line as the shell would": {"shlex.split"},
    "how much free space is left on the disk": {"shutil.disk_usage"},
    "open a page in the user's browser": {"webbrowser.open", "webbrowser.open_new"},
    "copy an object deeply, with the objects inside it": {"copy.deepcopy"},
    "replace dangerous characters such as < and & before putting text in a web page": {
        "html.escape"
    },
    "convert a string to small letters, not capitals": {"str.lower"},
}
"""A question, and the functions that answer it."""


def documented() -> dict[str, str]:
    """The functions' names, each with its name and the first paragraph of its docstring."""
    found = {}
    owners = [(name, importlib.import_module(name)) for name in MODULES]
    for prefix, owner in [*owners, *((kind.__name__, kind) for kind in METHODS)]:
        for name, member in inspect.getmembers(owner, callable):
            text = inspect.getdoc(member)
            if name.startswith("_") or inspect.isclass(member) or not text:
                continue
            if getattr(member, "__module__", None) not in (None, prefix, f"_{prefix}", "posixpath"):
                continue  # another module's, which this one only imports
            found[f"{prefix}.{name}"] = f"{name}: {text.partition(chr(10) * 2)[0]}"
    return found
