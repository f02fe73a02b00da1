"""Answers for the tests of the page: long, rich and hostile ones."""

LONG = "\n\n".join(f"Line {i}" + " that wraps" * (i % 10 == 0) * 20 for i in range(200))
RICH = """# Title

Text with **bold**, *italic*, `code` and [a link](https://example.org/a_b).

```python
x = 1  # a line that is longer than a phone is wide, and longer than that still, so that it scrolls
```

| a | b |
| --- | ---: |
| 1 | 2 |

> quoted

1. one
   - inner
2. two
"""
HOSTILE = """<script>window.harmed = 1</script>
<img src="http://evil.test/a.png" onerror="window.harmed = 2">
![picture](http://evil.test/b.png) ![x](x" onerror="window.harmed=3)

[run](javascript:window.harmed=4) [data](data:text/html,<script>alert(1)</script>)
[more](JaVaScRiPt:alert(1)) [tab](java\tscript:alert(1)) <javascript:alert(1)>
[good](https://example.org/"onmouseover="window.harmed=5)

```html"><script>window.harmed=6</script>
</code></pre><iframe src="http://evil.test/c"></iframe>
```

| <svg onload=window.harmed=7> | </td></table><style>*{display:none}</style> |
| --- | --- |
| <base href="http://evil.test/"> | <form action="http://evil.test/"><button>x</button></form> |

<link rel="stylesheet" href="http://evil.test/d.css"><meta http-equiv="refresh" content="0;url=http://evil.test/">
"""

UNITS = (
    *(">", "- ", "1. a\n\n", "# ", "```a", "|-", "|a\n|-\n", "-" + " " * 99),
    *("*", "**a ", "*a", "_a", "[", "![a](b ", "`a``", "<a>", "\\"),
    *("```" + "a" * 200_000 + "`", "|a\n-" + " " * 200_000 + "x", "# " + " " * 200_000 + "\r"),
)
"""What makes careless scans slow: short ones repeated, long ones as they are."""
