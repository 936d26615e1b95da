"""A few of the kills of kill_runs.py; trainings, and jobs of several processes, are killed in their rooms' tests."""

from tests.kill_runs import make_inputs, run_case


def test_a_killed_distillation_finishes_as_if_it_had_not_been(tmp_path):
    make_inputs(tmp_path)
    said = []
    run_case("distill", 2, tmp_path, say=said.append)
    assert said[-1].startswith("distill: 4 kills in ")
