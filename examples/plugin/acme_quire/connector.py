"""A connector of encoder caches: that of the example, in a folder of its own name."""

from quire.distributed.ec_connector import ECExampleConnector


class AcmeConnector(ECExampleConnector):
    """Keeps outputs of encoders as files."""
