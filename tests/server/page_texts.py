"""Answers for the tests of the page: long, rich and hostile ones, and the HTML of Markdown."""

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

GROWING = "- a\n\n- b\n\n  c\n\n-\n- d\n\ne | f\n- | -\n1 | 2\n"

_LINK = 'rel="noopener noreferrer" target="_blank"'
MARKDOWN = {
    "# A *b* #": "<h3>A <em>b</em></h3>",
    "a **b *c*** __d__ ~~e~~ f_g_h": (
        "<p>a <strong>b <em>c</em></strong> <strong>d</strong> <del>e</del> f_g_h</p>"
    ),
    "2 * 3 * 4 and **open": "<p>2 * 3 * 4 and **open</p>",
    "``a ` b`` \\*c\\* `open": "<p><code>a ` b</code> *c* `open</p>",
    "- a\n  more\n  1. b\n- c\n\ntext": (
        '<ul><li>a\nmore<ol start="1"><li>b</li></ol></li><li>c</li></ul><p>text</p>'
    ),
    "3. a\n\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "a\n***\nb": "<p>a</p><hr><p>b</p>",
    "|a|b|\n|:-:|-|\n|1 \\| 2|": (
        '<div class="table" tabindex="0"><table>'
        '<thead><tr><th class="center">a</th><th>b</th></tr></thead>'
        '<tbody><tr><td class="center">1 | 2</td><td></td></tr></tbody></table></div>'
    ),
    "[a](https://x.test/b_(c) 'd') <https://x.test/e>.": (
        f'<p><a href="https://x.test/b_(c)" {_LINK}>a</a> '
        f'<a href="https://x.test/e" {_LINK}>https://x.test/e</a>.</p>'
    ),
    "[a](mailto:b@x.test) [c](/d) ![e](f.png)": (
        f'<p><a href="mailto:b@x.test" {_LINK}>a</a> <span>c</span> <span>e</span></p>'
    ),
    "~~~py x\n**a**\n```\n\n<b>": (
        '<div class="code"><div class="code-head"><span>py</span>'
        '<button class="plain" type="button" data-copies="code">Copy</button></div>'
        '<pre tabindex="0"><code>**a**\n```\n\n&lt;b&gt;</code></pre></div>'
    ),
}
"""Some Markdown and its HTML."""
