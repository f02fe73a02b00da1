"""Whether a text is a program rather than prose: an answer that is code without fences would lose
its indentation, stars and underscores as Markdown.
"""

from __future__ import annotations

import re

MAX_LINES = 400
"""Lines at the beginning that are looked at."""

_LEAST_LINES = 2
_LEAST_SHARE = 0.6

_CODE = re.compile(
    r"""^\s*(?:
        (?:async\s+)?def\s+\w+\s*\( | class\s+\w+.*[:{]$ | from\s+[\w.]+\s+import\b
      | import\s+[\w.*{"'][^.!?]*;?$ | @\w[\w.]*(?:\(.*\))?$ | return\b(?!\s+\w+\s+\w+\s+\w+)
      | (?:el)?if\b.*[:{]$ | else\s*[:{]$ | for\b.*[:{]$ | while\b.*[:{]$ | try\s*[:{]$
      | except\b.*:$ | with\b.*:$ | (?:pub\s+)?fn\s+\w+ | func\s+\w* | (?:export\s+)?function\b
      | (?:const|let|var|static|public|private|protected)\s+\S+ | package\s+[\w.]+;?$
      | \#\s*(?:include|define|ifdef|ifndef|endif)\b | \#!/ | using\s+[\w:.\s=]+;
      | (?:SELECT|INSERT\s+INTO|CREATE\s+TABLE|UPDATE|DELETE\s+FROM|WHERE)\b.*
      | [\w.\[\]"'*,\s]{1,60}(?:[-+*/|&^%]|:|\?\?|//)?=(?!=)\s*\S.* | [\w.]+\(.*\)\s*[;:{]?$
      | [)\]}]+[;,)]*$ | </?[A-Za-z][^>]*>.* | .*[;{]$ | .*\)\s*:$ | print\b.*
    )""",
    re.VERBOSE,
)
_NEUTRAL = re.compile(r"^\s*(?:#(?!#)|//|/\*|\*|--|\"\"\"|''')")
"""Comments, which are headings and lists in Markdown."""
_FENCE = re.compile(r"^ {0,3}(?:```|~~~)", re.MULTILINE)
_MARKDOWN = re.compile(
    r"^[ \t]*(?:#{2,6} |[-*+] \*\*|\|.*\|[ \t]*$|> )|\*\*\w|\]\(https?:", re.MULTILINE
)


def is_code(text: str) -> bool:
    """Whether most lines look like those of a program, and none like Markdown. Linear."""
    if _FENCE.search(text) or _MARKDOWN.search(text):
        return False
    lines = [line for line in text.split("\n", MAX_LINES)[:MAX_LINES] if line.strip()]
    counted = [line for line in lines if not _NEUTRAL.match(line)]
    num_code = sum(1 for line in counted if len(line) < 400 and _CODE.match(line.rstrip()))
    return num_code >= _LEAST_LINES and num_code >= _LEAST_SHARE * len(counted)
