"""Documented names of `quire` that this release does not have, and what to do instead."""

UNBUILT_NAMES = {
    "ExplicitEncoderDecoderPrompt": "Encoder-decoder models are not served.",
    "DataPrompt": "There are no IO processors: give prompts as text or token ids.",
    "initialize_ray_cluster": "Ray does not start cores: use quire serve --headless on other "
    "machines.",
}
