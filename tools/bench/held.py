"""Bars that are no figure of a benchmark: what holds each is a test, or something done by hand that is named.

A test of this project checks that every test named here exists.
"""

from __future__ import annotations

from dataclasses import dataclass

ISSUES = {
    2: "llmcachefs: a model larger than memory",
    3: "Cache science: traces, policies, simulator, sizing",
    4: "llmcache trace",
    5: "KV spill manager (HillInfer)",
    6: "IceCache pages and transformers",
    7: "Kelle: eDRAM and the accelerator model",
    8: "Operation, hardening, documentation",
    17: "Stored prompts of llama.cpp",
}


@dataclass(frozen=True)
class Held:
    """A bar of an issue and the tests that hold it: "file::function", or a file as a whole (a script: what it runs).

    `by_hand` says what was done instead, where no test can.
    """

    issue: int
    what: str
    tests: tuple[str, ...] = ()
    by_hand: str = ""

    @property
    def by(self) -> str:
        """Return what holds it, for people."""
        return self.by_hand or ", ".join(self.tests)


HELD = (
    Held(
        3,
        "policies agree with libCacheSim, those of no documented difference exactly",
        ("tests/property/test_policies_libcachesim.py::test_misses_are_those_of_libcachesim",),
    ),
    Held(
        3,
        "LeCaR has the hit ratio of the authors' program on loops",
        ("tests/unit/test_policy_lecar.py::test_a_loop_has_the_hit_ratio_of_the_authors_program",),
    ),
    Held(
        3,
        "the log of an arena mount, replayed, gives the mount's hits, misses and evictions",
        ("tests/mount/test_access_log.py::test_a_replayed_log_is_the_mount",),
    ),
    Held(
        3,
        "llmcache size --bw 100 --loop 70M answers 60 MB and 64 MB",
        ("tests/unit/test_size_command.py::test_forward",),
    ),
    Held(
        4,
        "23 reads are traced as 23, by every path",
        (
            "tests/trace/test_paths.py::test_reads_of_cached_blocks_are_hits",
            "tests/trace/test_paths.py::test_reads_from_storage_are_misses",
            "tests/trace/test_paths.py::test_direct_reads_are_misses_without_fills",
        ),
    ),
    Held(
        4,
        "sequential, random, strided and interleaved reads give exactly their blocks",
        (
            "tests/e2e/test_trace_files.py::test_a_sequential_file_gives_exactly_its_blocks",
            "tests/e2e/test_trace_files.py::test_other_orders_give_exactly_theirs",
        ),
    ),
    Held(
        4,
        "llama.cpp: the loop is that of the tensors within 2 %, the period that of a token within 5 %",
        (
            "tests/e2e/test_trace_llama.py::test_the_loop_has_the_size_of_the_tensors",
            "tests/e2e/test_trace_llama.py::test_the_period_is_the_time_of_a_token",
        ),
    ),
    Held(
        4,
        "nothing stays attached after any exit, SIGKILL included",
        (
            "tests/trace/test_capture_command.py::test_nothing_is_attached_after_a_kill",
            "tests/trace/test_object.py::test_nothing_stays_attached_when_the_recorder_is_killed",
        ),
    ),
    Held(
        5,
        "a budget of the whole context is full attention bit for bit",
        (
            "tests/property/test_kv_policies.py::test_a_budget_of_the_whole_context_is_full_attention_bit_for_bit",
            "tests/property/test_kv_policies.py::test_the_same_over_the_emulated_device",
        ),
    ),
    Held(
        5,
        "alpha 0.2: within 0.01 of the full cache at 1, 2 and 4 k tokens",
        ("tests/hf/test_recall.py::test_a_fifth_of_the_context_is_enough",),
    ),
    Held(
        5,
        "where the paper's speed-ups are not reached, the page says by how much not, and what would have to be so",
        (
            "tests/unit/test_reproduce_claims.py::test_speed_ups_are_judged_by_the_papers_range",
            "tests/unit/test_reproduce_claims.py::test_needed_speeds_give_the_ends_of_the_range",
        ),
    ),
    Held(
        6,
        "largest difference of logits 0 in float32, every model family and way to generate",
        (
            "tests/hf/test_exact.py::test_a_batch_with_padding",
            "tests/hf/test_exact.py::test_ways_to_generate",
            "tests/hf/test_exact.py::test_several_turns",
            "tests/hf/test_exact.py::test_tokens_that_are_guessed_and_taken_back",
        ),
    ),
    Held(
        6,
        "the same with the oldest transformers",
        ("tests/hf/test_oldest.py::test_the_oldest_transformers_does_the_same",),
    ),
    Held(6, "what transformers' own tests of caches ask", ("tests/hf/test_as_transformers.py",)),
    Held(6, "the paper's comparison on a GPU", by_hand="not held: no GPU was at hand"),
    Held(7, "rows of the validation targets, within their tolerances", ("tests/unit/test_edram_model.py",)),
    Held(7, "monotonic over random configurations", ("tests/property/test_edram_monotone.py",)),
    Held(
        7,
        "AERP equals what keeps everything and masks, slot by slot; a budget for all is dense attention bit for bit",
        (
            "tests/property/test_edram_aerp_oracle.py::test_equals_what_keeps_everything_and_masks",
            "tests/property/test_edram_aerp_oracle.py::test_a_budget_for_all_is_dense_attention_bit_for_bit",
        ),
    ),
    Held(
        7,
        "the mean refresh interval of a long run is the harmonic mean within 0.1 %",
        ("tests/unit/test_edram_refresh.py::test_the_mean_interval_of_a_long_run_tends_to_the_harmonic_mean",),
    ),
    Held(
        7,
        "energies of groups sum to the total to 1e-9",
        ("tests/unit/test_edram_refresh.py::test_groups_sum_to_the_total",),
    ),
    Held(
        7,
        "recall model: order of harm of lost bits (paired seeds), accuracy over N' and over flips",
        (
            "tests/unit/test_edram_accuracy.py::test_the_order_of_harm_is_that_of_2drp",
            "tests/unit/test_edram_accuracy.py::test_losing_more_bits_harms_more_and_halves_do_not_bear_what_integers_bear",
            "tests/unit/test_edram_accuracy.py::test_a_smaller_budget_answers_less_and_scores_choose_better_than_recency",
        ),
    ),
    Held(
        8,
        "tools/demo and tools/test pass unattended on a fresh Debian 12",
        by_hand="by hand, in a chroot that debootstrap made",
    ),
    Held(
        8,
        "every command has help with examples, and documented exit codes",
        ("tests/unit/test_cli.py::test_help_lists_every_command_with_examples_and_exit_codes",),
    ),
    Held(8, "type check strict, lint clean", ("tools/test",)),
    Held(8, "tiers of mount and trace run in continuous integration", (".ci/run",)),
    Held(
        17,
        "logits, and 64 tokens of greedy continuation, are those of the state that was stored",
        (
            "tests/e2e/test_prefix.py::test_a_restored_prompt_goes_on_as_an_evaluated_one",
            "tests/e2e/test_prefix.py::test_smollm2_goes_on_from_the_disk",
        ),
    ),
    Held(
        17,
        "kill -9 at random moments, two processes on one directory: no wrong restore, no store refused",
        (
            "tests/unit/test_kv_prefix.py::test_writers_killed_at_any_moment_leave_blocks_that_are_right",
            "tests/e2e/test_prefix.py::test_after_a_kill_everything_restored_is_right",
        ),
    ),
    Held(
        17,
        "disk full, limit reached, clock set back, foreign files, another model of the same name",
        (
            "tests/unit/test_kv_prefix.py::test_on_a_full_disk_the_oldest_give_way_and_a_write_that_fails_costs_itself_alone",
            "tests/unit/test_kv_prefix.py::test_the_least_recently_used_goes_first_and_of_one_use_the_last",
            "tests/unit/test_kv_prefix.py::test_a_clock_set_back_changes_no_order_and_expires_nothing",
            "tests/unit/test_kv_prefix.py::test_foreign_files_are_nobodys_business",
            "tests/e2e/test_prefix.py::test_another_model_of_the_same_name_has_other_blocks",
        ),
    ),
)
