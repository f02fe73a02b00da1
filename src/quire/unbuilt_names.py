"""Documented names of `quire` that this release does not have, and what to do instead."""

UNBUILT_NAMES = {
    "ExplicitEncoderDecoderPrompt": "Encoder-decoder models are not served.",
    "DataPrompt": "Give {'data': ...} to encode() with pooling_task='plugin': see docs/plugins.md.",
}
