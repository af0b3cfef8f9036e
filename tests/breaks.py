"""Break each promise of docs/PROMISES.md in the code, one break at a time, and see that a test goes red.

`python -m tests.breaks` changes a file of the working tree, runs the test that should see it, puts the file back as it
was (after an error or Ctrl-C too), and goes on with the next break. It refuses a file with uncommitted changes. A break
counts as seen if a test fails: one that cannot be collected, is skipped or runs into its limit of time shows nothing.
The tests are not run unbroken, which CI does; `--check` does only that. Do not edit or run anything else in this
checkout meanwhile: it is broken. Exit status: 0 all breaks were seen, 1 some were not, 2 a break could not be played.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parent.parent
TO_COME = dict[int, str]()
"""Promises that are not implemented yet, so nothing can break them."""
TEST_SECONDS, RUN_SECONDS = 120, 300
"""How long a test may take if it has no limit of its own, and how long all cases of it may take together."""


class Break(NamedTuple):
    """One mistake in the code, and the test that should see it."""

    promise: int
    does: str
    file: str
    old: str
    """Text that occurs in the file exactly once."""
    new: str
    test: str
    """Node id of pytest, without `tests/`. If a test has several cases, the first red one ends the run."""


BREAKS = (
    Break(1, "A client is answered when its request was decided, before it is in the log.",
          "actors/coordinator/handlers/command_router.py",
          "self._live.when_durable(lambda: self.answer(request, value, error))", "self.answer(request, value, error)",
          "main/test_simulation.py::test_no_schedule_breaks_a_promise"),
    Break(1, "A group whose append failed for good is acted on as if it were in the log.",
          "actors/coordinator/log_writer.py", "self._post_failure(group, e)",
          "self._post(partial(self._call_durable, group))",
          "full/actors/test_writer.py::test_trouble_that_stays_fails_at_once_with_all_that_came_behind"),
    Break(1, "PostgreSQL may acknowledge a commit before it is written, if its own setting says so.",
          "events/store/database/postgres.py", "SET synchronous_commit = on; ", "",
          "full/events/test_trouble_postgres.py::TestPostgres::test_a_commit_is_never_acknowledged_before_it_is_"
          "written"),
    Break(2, "A unit that finished stays with its runner, so the runner's death has a finished task run again.",
          "projections/batch.py", "if flight.open_runs <= 0:", "if flight.open_runs < 0:",
          "pure/actors/test_decisions.py::TestRunnerLost::test_only_what_was_running_is_run_again"),
    Break(2, "Finalize drops finished tasks with the unfinished ones.",
          "actors/coordinator/decisions/batch_decisions.py",
          "if t not in batch.statuses and t not in batch.dropped", "if t not in batch.dropped",
          "pure/actors/test_decisions.py::TestEnd::test_p26_what_is_not_done_when_enough_is_done_is_dropped"),
    Break(2, "A new coordinator takes living runners for dead and has what they finish run again.",
          "actors/coordinator/decisions/batch_decisions.py", "for f in batch.flights.values()} - set(alive.items())",
          "for f in batch.flights.values()}",
          "main/test_deaths.py::test_a_killed_coordinator_is_replaced_and_nothing_is_run_again"),
    Break(3, "A commit that is in the log already is written again.", "events/store/log.py",
          "if earlier_position is not None:", "if earlier_position is not None and lease is not None:",
          "main/test_log_contract.py::TestOnce::test_a_repeated_commit_returns_the_first_result[sqlite]"),
    Break(3, "An outcome of a lost runner is taken for that of the next attempt.",
          "actors/coordinator/decisions/batch_decisions.py",
          "if flight is None or (flight.runner, flight.incarnation, flight.unit) != (runner, incarnation, unit):",
          "if flight is None:",
          "pure/actors/test_decisions.py::TestOutcome::test_a_late_outcome_of_a_lost_runner_is_not_taken_for_the_new_"
          "attempt"),
    Break(3, "Finalize asked again answers without the metrics of the pipeline.",
          "actors/coordinator/handlers/batches.py", "self.router.reply(request, batch.final_result)",
          'self.router.reply(request, {**(batch.final_result or {}), "metrics": {}})',
          "main/test_batches.py::test_p26_finalize_asked_again_gives_the_same_result"),
    Break(3, "A trainer that is back at step k does not get what step k + 1 used.",
          "actors/coordinator/handlers/batch_delivery.py", "untrained_since(connection, step, position)",
          "untrained_since(connection, step + 1, position)",
          "full/system/test_settlement.py::test_promise_3_a_trainer_back_at_step_k_gets_every_later_batch_again_and_"
          "nothing_is_generated_again"),
    Break(3, "The position in a taskset is written in a later transaction than the batch that was read from it.",
          "actors/coordinator/handlers/batches.py", "            self.live.record(advanced)\n",
          "            self.live.when_durable(lambda event=advanced: self.live.record(event))\n",
          "full/system/test_explorer.py::test_p32_p33_the_loop_uses_every_prompt_once_and_the_cursor_is_in_the_batch_s_"
          "transaction"),
    Break(3, "The position in a taskset is not written with the tasks that are added to a batch.",
          "actors/coordinator/handlers/batches.py",
          "are_added=True)\n            self._record_cursors(batch_id, command.cursor)\n", "are_added=True)\n",
          "full/system/test_refill.py::test_a_refilled_run_that_is_killed_ends_as_if_nothing_had_been"),
    Break(4, "The guardian waits before it starts a runner again, and then does not.", "actors/guardian/actor.py",
          'self.after(pause, f"start:{child.name}", lambda: self.start_again(child))', "pass",
          "main/test_deaths.py::test_a_killed_runner_is_replaced_and_only_what_was_running_is_run_again"),
    Break(4, "The keeper sees the guardian die and does not start the system again.",
          "trinity_es/system/keeper_start.py",
          'new_admin = _start_with_retries(config, admin, request["keeper"], claims_of(request["claims"]))',
          "new_admin = None",
          "main/test_deaths.py::test_what_nobody_supervises_is_started_again_and_the_waiting_client_gets_its_"
          "answer[guardian]"),
    Break(4, "A runner does not send a new coordinator what the dead one never acknowledged.",
          "actors/runner/outbox.py", "if resend_all or now - self._sent_at[n]", "if now - self._sent_at[n]",
          "pure/actors/test_outbox.py::test_given_groups_on_their_way_when_another_coordinator_comes_then_it_gets_all_"
          "in_their_order"),
    Break(5, "A writer whose lease was taken may still append: its epoch is not compared.",
          "events/store/writer_lease.py",
          "if epoch != lease.epoch:", "if epoch is None:",
          "main/test_log_contract.py::TestLease::test_who_takes_the_lease_fences_who_had_it[sqlite]"),
    Break(5, "The kernel is not asked to end a worker with its runner.", "events/processes.py",
          "ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)", "pass",
          "full/actors/test_workers.py::test_no_worker_outlives_its_runner"),
    Break(5, "An actor does not end with its parent.", "actors/sealed_transport.py", "end_with_parent(parent.pid or 0)",
          "pass", "full/system/test_nothing_left.py::test_nothing_of_a_system_is_left_whoever_dies_first[kill admin]"),
    Break(6, "A batch's metrics are summed in the order in which tasks happened to finish.", "projections/batch.py",
          "for task_id in sorted(counted):", "for task_id in counted:",
          "pure/projections/test_batch.py::test_promise_6_the_result_does_not_depend_on_the_order_in_which_runs_"
          "finish"),
    Break(6, "A decision counts failures in the state itself, beside the event that it records.",
          "actors/coordinator/decisions/batch_decisions.py", "    task = batch.tasks[unit.task]\n",
          "    task = batch.tasks[unit.task]\n    batch.failed_attempts += len(result.failures)\n",
          "pure/projections/test_batch.py::test_promise_6_live_state_equals_the_state_replayed_from_what_was_written"),
    Break(6, "Live state is made of the events as they were decided, not as the log gives them back.",
          "actors/coordinator/live_state.py", "events = [read_back for _, read_back in write.checked or ()]",
          "events = list(write.events)",
          "full/actors/test_live_state.py::test_promise_6_a_number_that_the_log_rounds_is_rounded_in_the_live_state_"
          "too"),
    Break(7, "`why` does not name the runner of a unit that it waits for.", "projections/why/explain.py",
          'f"{what} on {flight.runner} #{flight.incarnation} for ', 'f"{what} for ',
          "pure/projections/test_explain.py::test_a_slow_unit_is_named_with_task_runs_attempt_runner_and_limit"),
    Break(7, "A unit whose runner gives no sign of life is called slow.", "projections/why/explain.py",
          "elif beat is not None and beat > SILENT_SECONDS:", "elif False:",
          "pure/projections/test_explain.py::test_a_hung_unit_looks_different_and_says_how_that_is_known"),
    Break(7, "A batch that stands still is no event.", "actors/coordinator/fleet/batch_stalls.py",
          "self.live.record_batch(batch_id, [ev.StallDetected(waiting_on=answer.sentence, since=watched.moved_at)])",
          "pass",
          "full/system/test_why.py::test_a_stall_comes_once_and_again_when_its_cause_changes"),
    Break(8, "A run that failed counts with reward 0 in the metrics of its task.", "projections/batch.py",
          "metrics=[self.done[run].metrics for run in sorted(self.done)]",
          'metrics=[self.done[r].metrics if r in self.done else {"reward": 0.0} for r in range(self.total_runs)]',
          "pure/actors/test_decisions.py::TestOutcome::test_promise_8_a_failure_is_no_zero_reward"),
    Break(8, "An answer whose reward function fails has reward 0.", "trinity_es/workflows/simple.py",
          "                rewards.append(e)\n", "                rewards.append(0.0)\n",
          "full/actors/test_graders.py::test_of_a_hundred_graders_that_fail_none_becomes_a_reward[simple_workflow]"),
    Break(9, "A runner that came up and could not load the current weights serves with older ones.",
          "actors/coordinator/decisions/weight_decisions.py", "    if life.was_current:\n        return [failed]\n",
          "    if True:\n        return [failed]\n",
          "pure/actors/test_weights.py::test_p9_a_runner_that_comes_up_and_can_t_load_the_current_version_stays_failed_"
          "until_it_can"),
    Break(9, "An experience is stamped with the weights at its end, not with those that made its tokens.",
          "actors/rollout/result.py", "oldest = min((v for v, _, _ in experience.version_spans), default=version)",
          "oldest = current_version",
          "pure/actors/test_workflow_runner.py::test_p9_an_experience_is_stamped_with_the_weights_that_made_its_own_tokens"),
    Break(9, "A runner is given units while it loads the current weights.", "actors/coordinator/fleet/dispatcher.py",
          "is_free = runner.loading is None and runner.has_adapters", "is_free = runner.has_adapters",
          "main/test_simulation.py::test_no_schedule_breaks_a_promise"),
    Break(10, "A task that ends its runners is attempted for ever: its attempts are not counted.",
          "actors/coordinator/decisions/batch_decisions.py",
          "return batch.flights[unit.task, unit.run_id_base].strikes + 1 < batch.max_attempts", "return True",
          "pure/actors/test_decisions.py::TestRunnerLost::test_promise_10_a_task_that_kills_runners_is_failed_after_"
          "its_attempts"),
    Break(10, "A failed run fails the other runs of its task.", "actors/rollout/workflow_runner.py",
          "self._fail(e, part, part_result)", "self._fail(e, runs, part_result)",
          "pure/actors/test_workflow_runner.py::test_p10_one_failed_run_does_not_lose_its_group"),
    Break(11, "The HMAC of a frame is not compared.", "actors/frames.py",
          "[p for p in self._ports if hmac.compare_digest(seal, _seal(self._key, p, self._size, head))]",
          "[p for p in self._ports if len(seal) == len(_seal(self._key, p, self._size, head))]",
          "full/actors/test_door.py::test_a_frame_without_the_seal_is_dropped_unread_and_harms_nothing"),
    Break(11, "An engine's endpoint answers who shows no token.", "actors/serving/engine_server.py",
          'if not hmac.compare_digest(bearer_header(headers), f"Bearer {self.token}".encode()):', "if not self.token:",
          "full/actors/test_serving.py::test_p15_without_the_token_it_is_401"),
    Break(11, "The head takes hosts in without the key.", "actors/hosts/link.py",
          'if not hmac.compare_digest(shown.encode(errors="surrogateescape"), token.encode()):', "if not shown:",
          "full/hosts/test_link.py::test_who_has_another_key_is_not_heard"),
    Break(11, "A host speaks to whoever answers for the head.", "actors/hosts/head_client.py",
          "ssl=aiohttp.Fingerprint(place.digest)", "ssl=False",
          "full/hosts/test_link.py::test_who_answers_without_the_head_s_certificate_is_told_nothing"),
    Break(11, "The URL of a database is shown with its password.", "events/store/database/urls.py",
          "url.render_as_string(hide_password=True)", "url.render_as_string(hide_password=False)",
          "pure/test_config.py::test_the_password_of_the_store_is_in_no_text_but_the_dict"),
    Break(12, "An attempt that was lost is attempted again without what it had.",
          "actors/coordinator/fleet/dispatcher.py", 'kept="" if kept is None else kept.payload', 'kept=""',
          "main/test_journal.py::test_promise_12_a_lost_attempt_goes_on_where_it_was"),
    Break(12, "The event names no payload, so what a lost attempt had is nowhere.",
          "actors/coordinator/fleet/lost_journals.py", "payload=self._live.payloads.put(data)", 'payload=""',
          "main/test_journal.py::test_promise_12_a_lost_attempt_goes_on_where_it_was"),
    Break(12, "A task that was cut goes on in the next step without what it had.",
          "actors/coordinator/handlers/batches.py",
          "cut_tasks.kept_attempts(task, earlier_batch, batch)", "[]",
          "full/system/test_cut_tasks.py::test_what_a_step_leaves_goes_on_in_the_next_from_its_tokens"),
    Break(12, "Tokens are recorded when their call ends, and not while it is open.", "actors/runner/journal_writer.py",
          "records += [record for call in self.open for record in call.progress()]", "records += []",
          "main/test_journal.py::test_promise_12_a_lost_attempt_goes_on_where_it_was"),
    Break(12, "A record that does not begin where the answer ends is joined to it.", "events/journal.py",
          'if head["at"] != len(answer.tokens):', "if False:",
          "pure/actors/test_run_journal.py::test_promise_12_a_damaged_journal_gives_a_shorter_prefix_and_never_another"),
    Break(12, "An answer goes on without the tokens that it had in its prompt.", "actors/rollout/run_journal.py",
          "[*ids, *kept.tokens], one_answer", "[*ids], one_answer",
          "pure/actors/test_run_journal.py::test_promise_12_an_answer_goes_on_from_its_last_recorded_token"),
    Break(12, "A part goes on although the engine would treat its tokens otherwise in a prompt.",
          "actors/rollout/run_journal.py", "and not self.forbids", "",
          "pure/actors/test_run_journal.py::test_what_the_engine_would_forget_begins_again_and_is_named"),
    Break(13, "Of what was acknowledged only the position is looked up in the log, not the event there.",
          "events/store/checks/log_end.py", "return _hash_at(connection, head, mark.position) != mark.hash",
          "return mark.position > head.position",
          "full/events/test_log_end.py::TestAgainstTheLog::test_a_log_that_went_another_way_is_refused[sqlite]"),
    Break(13, "The host does not remember the position of an append.", "events/store/log.py", "self.memory.note(mark)",
          "pass", "full/events/test_log_end.py::test_an_append_is_noted_before_it_returns[sqlite]"),
    Break(13, "What a client of an earlier life knows of the log is not looked up.",
          "actors/coordinator/sender_mark_checks.py", "if mark is None or mark.teller == self._teller or", "if True or",
          "full/actors/test_sender_mark_checks.py::test_a_mark_that_the_log_has_not_stops_the_work_before_anything_is_done"),
    Break(14, "A lease whose attempt is over belongs to it still, and is not released.",
          "actors/coordinator/decisions/lease_decisions.py",
          "reason = end_of_attempt(batch, lives.get((taken.runner, taken.incarnation)), taken)",
          'reason = ""', "pure/actors/test_lease_decisions.py::test_a_lease_is_its_attempt_s_and_nobody_else_s"),
    Break(14, "What a lost attempt held waits for the next one, though its run starts over.",
          "actors/coordinator/decisions/lease_decisions.py",
          "if any(k.attempt >= taken.unit.attempt and not k.possibly_delivered for k in kept):", "if kept:",
          "pure/actors/test_lease_decisions.py::test_a_lease_of_a_lost_attempt_waits_while_its_run_may_go_on"),
    Break(14, "A resource that could not be taken over is not released.",
          "actors/coordinator/decisions/lease_decisions.py",
          "if earlier_lease is None or earlier_lease.orphaned else [lease, earlier_lease]", "",
          "pure/actors/test_lease_decisions.py::test_a_lease_that_can_not_be_taken_over_is_released_with_its_successor"),
    Break(14, "A run that ends does not tell of the leases that it did not release.", "actors/rollout/leases.py",
          'self.report(lease, "left", reason="its run ended without releasing it")', "pass",
          "full/actors/test_run_leases.py::test_a_run_that_ends_leaves_what_it_did_not_release_and_takes_no_more"),
    Break(14, "All leases have one key, so one run is given what another holds.", "actors/rollout/leases.py",
          "uuid.uuid4().hex", "uuid.UUID(int=0).hex",
          "full/actors/test_run_leases.py::test_without_a_system_the_same_workflow_plays"),
    Break(15, "A key that a table gives a row without a value is a value.", "events/json_values.py",
          "for key, inner in value.items() if inner is not None}", "for key, inner in value.items()}",
          "pure/test_rows.py::test_a_key_whose_value_is_null_is_no_key"),
    Break(15, "A row of messages is asked without the system prompt of its taskset.",
          "trinity_es/workflows/row_prompts.py",
          '        messages.insert(0, {"role": "system", "content": system})\n', "        pass\n",
          "pure/test_row_prompts.py::test_a_row_of_messages_is_asked_as_its_text_is"),
    Break(15, "A reward without any part is 0.", "trinity_es/workflows/rewards.py",
          "if isinstance(result, Mapping) and not (result and all(",
          "if isinstance(result, Mapping) and result and not (all(",
          "pure/test_rewards_of_trl.py::test_what_is_no_part_is_no_zero"),
    Break(15, "A run goes on with a file that changed.", "trinity_es/tasksets/source.py",
          "(source.revision, source.rows) != (recorded.revision, recorded.rows)", "source.rows != recorded.rows",
          "pure/test_taskset_sources.py::test_a_file_that_changed_or_another_order_is_refused"),
    Break(15, "An eval's mean is over the runs that its tasks have, and n is theirs.", "projections/batch.py",
          "aggregate_task(status.metrics, is_eval, status.total_runs if form > 1 else 0)",
          "aggregate_task(status.metrics, is_eval, 0)",
          "pure/projections/test_batch.py::test_an_eval_whose_tasks_lost_runs_has_one_mean_over_all_and_says_how_many_are_"
          "missing"),
    Break(15, "A copy of a store has the lease of the original.", "events/store/writer_lease.py",
          'return "" if leased_store.is_same(current) else leased_store.place', 'return ""',
          "main/test_log_contract.py::TestLease::test_nobody_holds_it_in_a_copy_of_the_store[sqlite]"),
)


class Refused(Exception):
    """A break cannot be played."""


class Played(NamedTuple):
    """Outcome of a test: `red`, `GREEN`, or why it shows nothing."""

    verdict: str
    seconds: float
    test: str
    said: str


def broken(one: Break) -> str:
    """Return the text of the break's file with the break in it. Raises Refused."""
    text = (ROOT / one.file).read_text()
    if (times := text.count(one.old)) != 1:
        raise Refused(f"{one.file} has {times} times, not once: {one.old!r} (promise {one.promise}: {one.does})")
    return text.replace(one.old, one.new)


@contextlib.contextmanager
def applied(one: Break) -> Iterator[None]:
    """Apply the break to the working tree. Raises Refused if the file has uncommitted changes."""
    file = ROOT / one.file
    if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", one.file], cwd=ROOT, check=False).returncode:
        raise Refused(f"{one.file} has uncommitted changes: commit or stash them")
    changed, before, stat = broken(one), file.read_bytes(), file.stat()
    try:
        file.write_text(changed)
        yield
    finally:
        file.write_bytes(before)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # what Python compiled of it before is right again


def run_tests(tests: Sequence[str], *options: str, seconds: float) -> Played:
    """Run these tests. The broken code is not kept as bytecode, which could outlive the break."""
    mark = uuid.uuid4().hex  # by which all processes that the tests start are known
    env = {**os.environ, "DURATIONS": "", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "500", "TRINITY_BREAK": mark}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}", *options,
               *(f"tests/{test}" for test in tests)]
    began, out = time.monotonic(), ""
    with subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as process:
        try:
            out, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            out = f"no end after {seconds:.0f} s"
        finally:
            process.send_signal(signal.SIGINT)  # if it still runs; pytest ends what its tests started
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=30)
            for left in psutil.process_iter():  # some breaks are that a process does not end
                with contextlib.suppress(psutil.Error):
                    if left.environ().get("TRINITY_BREAK") == mark:
                        left.kill()
    said = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - (.*))?$", out, re.M)
    test, why = (said[1], said[2] or "") if said else (f"tests/{tests[0]}", (out.strip().splitlines() or [""])[-1])
    passed = "GREEN" if re.search(r"\d passed", out) else "skipped"
    failed = ("timeout" if "Timeout (>" in why else "red") if said else "exit 1"
    verdict = {0: passed, 1: failed}.get(process.returncode, f"exit {process.returncode}")
    return Played(verdict, time.monotonic() - began, test, why)


def play(chosen: Sequence[Break], as_json: bool) -> int:
    """Play these breaks, and print a row for each. Return the exit status."""
    rows = []
    for one in chosen:
        with applied(one):
            played = run_tests([one.test], "-x", seconds=RUN_SECONDS)
        rows.append({"promise": one.promise, "break": one.does, "file": one.file, **played._asdict()})
        if not as_json:
            print(f"{one.promise:>2}  {played.verdict:<7} {played.seconds:5.1f} s  {one.does}\n"
                  f"{'':20}{played.test}\n{'':20}{played.said[:200]}", flush=True)
    seen = sum(row["verdict"] == "red" for row in rows)
    print(json.dumps(rows, indent=2) if as_json else f"{seen} of {len(rows)} breaks were seen")
    return int(seen < len(rows))


def main() -> int:
    """Play the breaks that the command line chooses."""
    parser = argparse.ArgumentParser("python -m tests.breaks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("promises", nargs="*", type=int, help="numbers of promises, such as 3 9 (all if there is none)")
    parser.add_argument("--list", action="store_true", help="show the breaks and their tests, and play none")
    parser.add_argument("--json", action="store_true", help="print JSON at the end, in place of a table")
    parser.add_argument("--check", action="store_true", help="run the tests once without any break: they should pass")
    asked = parser.parse_args()
    known = {one.promise for one in BREAKS} | TO_COME.keys()
    if unknown := set(asked.promises) - known:
        parser.error(f"no promise has the number {min(unknown)}: give some of {', '.join(map(str, sorted(known)))}")
    chosen = [one for one in BREAKS if one.promise in asked.promises or not asked.promises]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception: the file is put back
    if asked.list:
        print(*(f"{one.promise:>2}  {one.does}\n    {one.file}, seen by tests/{one.test}" for one in chosen),
              *(f"{number:>2}  to come: {what}" for number, what in TO_COME.items()), sep="\n")
        return 0
    if asked.check:
        tests = dict.fromkeys(one.test for one in chosen)
        played = run_tests(list(tests), seconds=RUN_SECONDS + 20.0 * len(tests))
        print(f"{played.verdict}: {played.said}")
        return int(played.verdict != "GREEN")
    try:
        return play(chosen, asked.json)
    except Refused as e:
        parser.exit(2, f"{e}\n")


if __name__ == "__main__":
    sys.exit(main())
