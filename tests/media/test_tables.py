"""The page lists what there is."""

import re

from quire.media.image_processors.table import PROCESSORS
from quire.media.prompt_rules.table import RULES
from tests.house.package import ROOT


def test_the_page_names_every_processor_and_rule():
    text = (ROOT / "docs" / "pictures.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+ImageProcessor)`", text))
    assert named == set(PROCESSORS)
    assert set(re.findall(r"`(\w+Processor)`", text)) - named == set(RULES)
