"""`EngineArgs`: the options of an engine with what turns them into a plan.

The fields are declared in engine_options.py, so that `resolve()` can read them without importing
what calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.config.args.engine_options import EngineOptions

if TYPE_CHECKING:
    from quire.config.plan import EnginePlan


@dataclass
class EngineArgs(EngineOptions):
    """Everything that can be chosen when an engine is made; the fields are in
    docs/engine_args.md. None means that `resolve()` decides.

    Plain and mutable: assign fields, `vars(args)`, `dataclasses.asdict(args)` and
    `LLM(**vars(args))` all work. Values are checked when the engine is made. Raises
    UnknownParameter for a keyword that is not a field, with the nearest name.
    """

    def create_engine_config(
        self, usage_context: object = None, headless: bool = False
    ) -> EnginePlan:
        """Look at model and machine and decide everything: what an engine is built from.

        `headless`: its cores serve a front end on another machine. `usage_context` is for reports
        of usage, which are never sent.
        """
        from quire.config.planning import make_plan  # with it the reading of model files

        return make_plan(self, is_headless=headless)

    def create_speculative_config(
        self, target_model_config: object, target_parallel_config: object
    ) -> Any:
        """The source of drafts, or None; the plan decides it, from the model's own files."""
        return self.create_engine_config().speculative_config
