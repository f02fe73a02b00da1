"""`AsyncEngineArgs`: the options of an engine that serves several callers at once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import ClassVar, Self

from quire.config.args.engine_args import EngineArgs
from quire.config.args.engine_options import SAMPLING_AND_OUTPUT
from quire.config.args.option import options_of
from quire.config.args.server_args import ServerArgs


@dataclass
class AsyncEngineArgs(EngineArgs):
    """`EngineArgs` for many callers: shorter steps where `max_num_batched_tokens` is not given."""

    serves_several_callers: ClassVar[bool] = True

    enable_log_requests: bool = SAMPLING_AND_OUTPUT.flag(
        False, "Log the id of every request on arrival."
    )

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The options from what `argparse` made of the command line. In that of a server, flags
        that only servers have an effect for (--reasoning-parser) are the server's.
        """
        given, of_server = vars(args), options_of(ServerArgs)
        # the namespace of a server's command has all of its flags
        if of_server.keys() <= given.keys():
            engine = options_of(cls)
            shared = {name for name in of_server.keys() & engine if not engine[name].is_built}
            given = {name: value for name, value in given.items() if name not in shared}
        return super().from_cli_args(argparse.Namespace(**given))
