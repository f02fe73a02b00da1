"""The devices that a runner's tensors live on."""
