"""A scheduler's configuration from names alone, whatever part they stand in."""

from quire.scheduling.settings import SchedulerConfig, StepsPlan


def scheduler_config(**values):
    """`SchedulerConfig` of its own fields and those of `StepsPlan`; `policy` for short."""
    if "policy" in values:
        values["scheduling_policy"] = values.pop("policy")
    steps = {name: values.pop(name) for name in StepsPlan.__struct_fields__ if name in values}
    return SchedulerConfig(steps=StepsPlan(**steps), **values)
