"""RULER's tasks: prompts, the rule of scoring, the table and JSON, interrupts, errors."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from course_lib.cli import main
from course_lib.errors import CourseError
from course_lib.lab import ruler, world
from course_lib.lab.policy_options import PolicyOptions
from course_lib.lab.ruler import Cell, RulerOptions, Sample, match, run_ruler
from course_lib.lab.ruler_tasks import CHAIN, KEYS, TASKS, build_ruler_prompt

SMALL = RulerOptions(lengths=(192,), samples=1, chunk=64, block_size=32, max_new_tokens=12)
ARGS = ["ruler", "--lengths", "200", "--samples", "2", "--chunk", "64", "--block-size", "32",
        "--max-new-tokens", "12"]


@pytest.mark.parametrize("text, references, score", [
    ("VAR zamu, VAR qiro.", ("zamu", "qiro"), 1.0), ("VAR ZAMU.", ("zamu", "qiro"), 0.5),
    ("", ("zamu",), 0.0), ("zamus", ("Zamu",), 1.0), ("za mu", ("zamu",), 0.0),
])
def test_a_reference_counts_wherever_it_stands(text, references, score):
    assert match(text, references) == score


def test_all_is_the_mean_share_and_any_counts_samples():
    stats = {"mask_density": 0.5, "applied_density": 0.75, "bytes_density": 1.5}
    samples = [Sample(t, ("a", "b"), match(t, ("a", "b")), stats, s)
               for t, s in (("a b", 1.0), ("a", 2.0), ("", 9.0))]
    row = Cell("niah_single", 512, "xattn", samples).as_row()
    assert row["all"] == 0.5 and row["any"] == pytest.approx(2 / 3) and row["prefill_s"] == 2.0
    assert (row["mask_density"], row["applied_density"], row["bytes_density"]) == (0.5, 0.75, 1.5)
    assert Cell("niah_single", 512, "xattn").as_row()["samples"] == 0


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("template", ["chat", "instruct"])
def test_a_prompt_has_its_tokens_and_holds_what_is_asked_once(shipped_engine, task, template):
    for seed in range(3):
        prompt = build_ruler_prompt(shipped_engine, task, 300, seed, template)
        assert len(prompt.ids) == 300
        text = "\n".join(prompt.lines)
        for reference in prompt.references:
            count = len(re.findall(rf"\b{reference}\b", text))
            chained = task == "variable_tracking" and reference != prompt.references[-1]
            assert count == (2 if chained else 1)  # given once, and passed on
        assert (prompt.question in shipped_engine.decode(prompt.ids))


def test_one_needle_stands_among_filler_and_many_keys_among_facts(shipped_engine):
    single = build_ruler_prompt(shipped_engine, "niah_single", 400, 1)
    assert sum("'s " in line for line in single.lines) == 1
    keys = build_ruler_prompt(shipped_engine, "niah_multikey", 400, 1)
    attribute = next(a for a in world.ATTRIBUTES if a in keys.question)
    assert sum(attribute in line for line in keys.lines) >= KEYS
    name = keys.question.removeprefix("What is ").partition("'s")[0]
    assert sum(line.startswith(f"{name}'s {attribute} ") for line in keys.lines) == 1


def test_a_chain_goes_from_a_number_from_variable_to_variable(shipped_engine):
    for template, length in CHAIN.items():
        prompt = build_ruler_prompt(shipped_engine, "variable_tracking", 300, 5, template)
        chain = [line for line in prompt.lines if line.startswith("VAR ")]
        sources = [line.removesuffix(".").split(" = ")[1] for line in chain]
        assert len(chain) == length == len(prompt.references)
        assert [line.split()[1] for line in chain] == list(prompt.references)
        assert sources[1:] == list(prompt.references[:-1]) and sources[0] in prompt.question


def test_prompts_follow_their_seed(shipped_engine):
    def ids(task, seed):
        return build_ruler_prompt(shipped_engine, task, 200, seed).ids

    for task in TASKS:
        assert ids(task, "0-1") == ids(task, "0-1") != ids(task, "0-2")


def test_impossible_prompts_are_refused(shipped_engine):
    with pytest.raises(CourseError, match="variable_tracking needs at least .* 20 were asked"):
        build_ruler_prompt(shipped_engine, "variable_tracking", 20, 0)
    with pytest.raises(ValueError, match="task must be one of niah_single"):
        build_ruler_prompt(shipped_engine, "qa", 200, 0)


def test_policies_meet_the_same_prompts_and_the_model_finds_needles(shipped_engine):
    options = replace(SMALL, tasks=("niah_single", "niah_multikey"), threshold=1.0)
    cells = list(run_ruler(shipped_engine, options))
    assert [(c.task, c.length, c.policy) for c in cells] == options.cells()
    for full, _, everything in zip(cells[::3], cells[1::3], cells[2::3], strict=True):
        assert full.as_row()["all"] == 1.0 and len(full.samples) == 1
        assert [s.text for s in everything.samples] == [s.text for s in full.samples]
        assert everything.as_row()["applied_density"] == full.as_row()["applied_density"] == 1.0
        assert everything.as_row()["bytes_density"] == 1.5  # K once more, for the estimate
    assert all(c.as_row()["applied_density"] < 1 for c in cells[1::3])


def test_options_reach_the_policy():
    options = RulerOptions(chunk=256, block_size=64, threshold=0.8, aggregate="per_head")
    xattn = options.policy("xattn").make()
    assert (float(xattn.threshold), xattn.block_size, xattn.aggregate) == (0.8, 64, "per_head")
    assert xattn.short_query == 256
    assert replace(options, chunk=4096).policy("xattn").make().short_query == 1024
    assert options.policy("quest").make().block_size == 64
    given = PolicyOptions("full", chunk=512, offload=True, ram_budget=10**6).for_prefill()
    assert given.pop("policy").name == "full"
    assert given == {"chunk": 512, "offload": True, "ram_budget": 10**6}


def test_the_command_prints_json_and_only_that(capsys):
    assert main([*ARGS, "--tasks", "niah_single", "--policy", "quest,full", "--json",
                 "--sparse-threshold", "0.8", "--seed", "3"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(c["task"], c["length"], c["policy"]) for c in record["cells"]] == [
        ("niah_single", 200, "quest"), ("niah_single", 200, "full")]
    assert all(c["samples"] == 2 and len(c["texts"]) == 2 for c in record["cells"])
    assert record["seed"] == 3 and record["threshold"] == 0.8 and record["chunk"] == 64
    assert "upper or lower case" in record["rule"]


def test_the_table_has_a_line_for_each_cell_and_states_the_rule(capsys):
    assert main([*ARGS, "--samples", "1", "--max-new-tokens", "3"]) == 0
    out, err = capsys.readouterr()
    assert [tuple(line.split()[:3]) for line in out.splitlines() if line.startswith(TASKS)] == [
        (task, "200", policy) for task in TASKS for policy in ("full", "quest", "xattn")]
    assert ruler.RULE in out and err == ""


def test_a_length_that_is_too_short_is_said_before_any_run(shipped_engine, monkeypatch):
    monkeypatch.setattr(ruler, "run_sample", lambda *_: pytest.fail("a run was made"))
    with pytest.raises(CourseError, match="niah_single needs at least"):
        next(run_ruler(shipped_engine, replace(SMALL, tasks=("niah_single", "niah_multikey"),
                                               lengths=(200, 20))))


def test_ctrl_c_keeps_what_is_finished(capsys, monkeypatch):
    run = ruler.run_sample

    def interrupted(engine, prompt, policy, tokens):
        if policy.name == "quest":
            raise KeyboardInterrupt
        return run(engine, prompt, policy, tokens)

    monkeypatch.setattr(ruler, "run_sample", interrupted)
    assert main([*ARGS, "--tasks", "niah_single", "--json"]) == 130
    out, err = capsys.readouterr()
    assert [c["policy"] for c in json.loads(out)["cells"]] == ["full"]
    assert err == "course: interrupted; kept 1 of 3 rows\n"


@pytest.mark.parametrize("wrong, message", [
    (["--tasks", "niah"], "--tasks: must be some of niah_single"),
    (["--policy", "full,best"], "unknown prefill policy 'best'; there are full, quest, xattn"),
    (["--sparse-threshold", "9"], "not 9; did you mean 0.9?"),
    (["--sparse-threshold", "0"], "must be in (0, 1]"),
    (["--sparse-threshold", "x"], "must be a number above 0 and at most 1, not 'x'"),
    (["--sparse-threshold", "nan"], "must be in (0, 1]"),
    (["--lengths", "512,0"], "--lengths: must be an integer of at least 1, not '0'"),
    (["--chunk", "100", "--block-size", "64"], "--chunk 100 is no multiple of the block size 64"),
    (["--block-size", "60", "--chunk", "60"], "stride 8 must divide block_size 60"),
    (["--lengths", "4096"], "do not fit the model's context of 4096"),
    (["--lengths", "10"], "needs at least"), (["--lengths", "200,10"], "needs at least 26 tokens"),
])
def test_wrong_options_are_one_sentence(capsys, wrong, message):
    assert main(["ruler", *wrong]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
