"""A schema as it is compiled."""

from quire.grammar.json_schema.openness import Openness
from quire.grammar.json_schema.preparing import PreparedSchema
from quire.grammar.lowering import GuidancePatterns


def prepared(schema, openness=Openness.CLOSED):
    return PreparedSchema(schema, openness, GuidancePatterns())


def unfolded(schema, openness=Openness.CLOSED):
    return prepared(schema, openness).schema()
