"""Methods of workers for tests: what a rank is, and how it fails."""

from __future__ import annotations

import os
import threading
import time

from quire.runner.rows import Rows


class RankExtension:
    """Added to each worker by `worker_extension_cls`."""

    def rank_and_pid(self):
        return [self.rank, os.getpid()]

    def known_of_the_engine(self):
        own = self.parallel_config
        return [
            [own.rank, own.world_size, own.local_world_size, self.is_driver_worker],
            [self.model_config.max_model_len, self.load_config.load_format],
            self.vllm_config.parallel_config.rank,
        ]

    def nap(self, seconds, rank):
        if self.rank == rank:
            time.sleep(seconds)
        return self.rank

    def refuse_on(self, rank):
        if self.rank == rank:
            raise ValueError(f"rank {rank} does not want to")

    def forget_failed_steps(self, forgets=True):
        """Have rows stay where steps have left them that have failed elsewhere: a planted bug."""
        if forgets:
            self._retreat, Rows.retreat = Rows.retreat, lambda *given: None
        else:
            Rows.retreat = self._retreat

    def fail_inside(self, rank, token, layer):
        """Have each pass of a rank with a row that begins with the token twice fail when it comes
        to the experts of this layer, inside its round.
        """
        if self.rank != rank:
            return
        runner, rounds = self.model_runner, self.rounds
        forward, exchange, bad = runner._forward, rounds._pass, []

        def watched(batch, **given):
            ids, count = runner.rows.token_ids, runner.rows.num_tokens
            begins = [ids[row, : int(count[row])].tolist()[:2] for row in sorted(self._planned)]
            bad[:] = [each for each in begins if each == [token, token]]
            return forward(batch, **given)

        def failing(rows, counts):
            if bad and rounds._passed == layer:
                bad.clear()  # it serves the rest
                raise RuntimeError(f"no way into layer {layer}")
            return exchange(rows, counts)

        self._note_planned()
        runner._forward, rounds._pass = watched, failing

    def hang_after(self, core, rank, num_rounds, at):
        """Have a rank of one of the cores that share experts wait for ever after some rounds: `at`
        "begin", before the next one, or `at` "_run", while it computes for all cores.
        """
        rounds = self.rounds
        if (rounds._group.rank, self.rank) != (core, rank):
            return
        method, last = getattr(rounds, at), rounds.num_rounds + num_rounds

        def hanging(*given):
            if rounds.num_rounds >= last:
                threading.Event().wait()
            return method(*given)

        setattr(rounds, at, hanging)

    def _note_planned(self):
        """Keep the rows of the plan that is being run."""
        launch = self.launch

        def noting(plan, *given, **named):
            self._planned = {*plan.decode_rows, *(chunk.row for chunk in plan.chunks)}
            return launch(plan, *given, **named)

        self.launch = noting

    def fail_with(self, rank, token, first=0):
        """Have the model of a rank fail in steps with a row that begins with the token twice and
        has computed `first` tokens (None: no more).
        """
        if self.rank != rank:
            return
        runner = self.model_runner

        def failing(batch, **given):
            ids = runner.rows.token_ids
            for row in sorted(self._planned):
                begin = ids[row, : int(runner.rows.num_tokens[row])].tolist()[:2]
                if begin == [token, token] and runner.rows.num_computed[row] >= first:
                    raise RuntimeError(f"token {token} in row {row}")
            return forward(batch, **given)

        if token is None:
            runner._forward, self.launch = self._kept
            return
        forward, _ = self._kept = runner._forward, self.launch
        self._note_planned()
        runner._forward = failing
