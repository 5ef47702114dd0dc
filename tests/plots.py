"""Pictures for eyes and for the documentation: `python -m tests.plots WHAT --out DIR`.

`pid`, `gains`, `weights` and `policies` show the control core in a small closed loop; `screens` makes screenshots of
`top` and of a report from a recording (`--recording FILE`, else a made-up run), with Chromium.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl

from agent.core import Core, CoreSettings
from agent.health import HealthSettings
from agent.pid import DEAD_ZONE, GAINS_BY_MEDIUM, TARGET_SCORE, PidState, pid_step
from agent.policies.base import PolicySettings, make_policy
from agent.types import Medium
from tests.unit.agent.closed_loop import MIB, Node, Trainer

mpl.use("Agg")

from matplotlib import pyplot as plt  # the backend comes first

LAGS = {Medium.SSD: 0.3, Medium.HDD: 1.0}
FACTORS = (0.25, 1.0, 4.0)
WEIGHTS = ("queue", "latency", "variation", "demand")


def step_response(medium, seconds=30.0, dt=0.1, gains=None):
    """A quota of 30 % of the need, at half time a need twice as large: times, scores, quotas, outputs.

    The score follows the quota with the medium's lag: 100 * (1 - exp(-1.4 * quota / need)).
    """
    quota, score, state = 0.3, 0.0, PidState()
    gains = gains or GAINS_BY_MEDIUM[medium]
    rows = []
    for n in range(int(seconds / dt)):
        need = 1.0 if n * dt < seconds / 2 else 2.0
        reached = 100.0 * (1.0 - math.exp(-1.4 * quota / need))
        score += (1.0 - math.exp(-dt / LAGS[medium])) * (reached - score)
        state, terms = pid_step(gains, state, TARGET_SCORE - score, dt)
        quota *= 1.0 + terms.output
        rows.append((n * dt, score, quota, 100.0 * terms.output))
    return list(zip(*rows, strict=True))


def plot_pid(out):
    """Step responses per medium: the score with its dead zone, the quota, the output."""
    figure, axes = plt.subplots(3, 1, sharex=True, figsize=(9, 8))
    for medium in LAGS:
        times, scores, quotas, outputs = step_response(medium)
        for axis, values in zip(axes, (scores, quotas, outputs), strict=True):
            axis.plot(times, values, label=str(medium))
    axes[0].axhspan(TARGET_SCORE - DEAD_ZONE, TARGET_SCORE + DEAD_ZONE, alpha=0.15)
    for axis, label in zip(axes, ("score (points)", "quota (of the first need)", "output (% a step)"), strict=True):
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].legend()
    axes[2].set_xlabel("time (s); the need doubles half way")
    return [save(figure, out / "pid-step-response.png")]


def plot_gains(out):
    """The quota's way for a quarter of, the usual and four times each gain, on both media."""
    figure, axes = plt.subplots(2, 3, sharex=True, sharey="row", figsize=(10, 5))
    for row, medium in zip(axes, LAGS, strict=True):
        usual = GAINS_BY_MEDIUM[medium]
        for axis, name in zip(row, ("kp", "ki", "kd"), strict=True):
            for factor in FACTORS:
                value = factor * getattr(usual, name)
                times, _, quotas, _ = step_response(medium, gains=replace(usual, **{name: value}))
                axis.plot(times, quotas, label=f"{value:g}", linewidth=2.0 if factor == 1.0 else 1.0)
            axis.set_title(f"{medium}: {name}", fontsize=10)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
        row[0].set_ylabel("quota (of the first need)")
    for axis in axes[1]:
        axis.set_xlabel("time (s); the need doubles at 15 s")
    return [save(figure, out / "gains.png")]


def neighbourhood():
    """Two jobs that starve beside a greedy reader from 5 to 20 s, and one with slack."""
    return Node(
        [
            Trainer(1, batch=4 * MIB),
            Trainer(2, batch=3 * MIB),
            Trainer(3, batch=1 * MIB, compute=0.2),
            Trainer(9, training=False, streams=32, start=5.0, stop=20.0),
        ]
    )


def run_policy(name, seconds=26.0, *, health=None, obeyed=True):
    """The neighbourhood under a policy: times, scores, caps per job. Caps that are not `obeyed` are thought alone."""
    node = neighbourhood()
    core = Core(
        make_policy(name, PolicySettings()),
        CoreSettings(signals=node.settings(), health=health or HealthSettings()),
    )
    rows = []
    while node.now < seconds:
        node.advance(0.1)
        samples = {job.id: job.sample(node.now) for job in node.jobs}
        result = core.step(node.now, samples, [job.job() for job in node.jobs], node.devices)
        caps = {slot: quota.share for slot, quota in result.decision.quotas.items()}
        node.caps = caps if obeyed else {}
        scores = {number: report.health.score for number, report in result.reports.items() if report.health}
        rows.append((node.now, scores, {slot[0]: share for slot, share in caps.items()}))
    return rows


def plot_weights(out):
    """The score of the job that starves: as it is, and as each of the four metrics alone would have it."""
    figure, axis = plt.subplots(figsize=(10, 3.6))
    alone = dict.fromkeys((f"{name}_weight" for name in WEIGHTS), 0.0)
    choices = {f"{name} alone": HealthSettings(**alone | {f"{name}_weight": 1.0}) for name in WEIGHTS}
    for label, health in (choices | {"the usual weights": HealthSettings()}).items():
        rows = run_policy("adaptive", health=health, obeyed=False)
        scores = [scores.get(1, math.nan) for _, scores, _ in rows]
        axis.plot([now for now, _, _ in rows], scores, label=label, linewidth=1.0 if "alone" in label else 2.5)
    axis.axvspan(5.0, 20.0, alpha=0.08)
    for level in (60, 40, 20):
        axis.axhline(level, linestyle=":", linewidth=0.8, color="grey")
    axis.set_xlabel("time (s); a neighbour reads all it can get from 5 to 20 s, and nobody is capped")
    axis.set_ylabel("score (points)")
    axis.legend(fontsize=8, loc="lower left")
    return [save(figure, out / "weights.png")]


def plot_policies(out):
    """Scores and caps over time, one column per policy."""
    names = ("paper", "adaptive")
    figure, axes = plt.subplots(2, len(names), sharex=True, sharey="row", figsize=(10, 5.5))
    for column, name in enumerate(names):
        rows = run_policy(name)
        times = [now for now, _, _ in rows]
        for job in (1, 2, 3):
            axes[0][column].plot(times, [scores.get(job, math.nan) for _, scores, _ in rows], label=f"job {job}")
        for job in (1, 2, 3, 9):
            label = "best effort" if job == 9 else f"job {job}"
            axes[1][column].plot(times, [caps.get(job, math.nan) for _, _, caps in rows], label=label)
        axes[0][column].set_title(name)
        axes[1][column].set_xlabel("time (s); best effort reads from 5 to 20 s")
    axes[0][0].set_ylabel("score (points)")
    axes[1][0].set_ylabel("cap (share of the device)")
    axes[1][1].legend(fontsize=8, loc="center left")
    return [save(figure, out / "policies-closed-loop.png")]


def save(figure, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path


PLOTS = {"pid": plot_pid, "gains": plot_gains, "weights": plot_weights, "policies": plot_policies}


def main(arguments=None):
    """Draw what is named and say where it is."""
    parser = argparse.ArgumentParser(prog="python -m tests.plots", description=__doc__)
    parser.add_argument("what", choices=[*PLOTS, "screens"])
    parser.add_argument("--out", type=Path, required=True, help="folder for the images")
    parser.add_argument("--recording", type=Path, help="of which `screens` are made")
    options = parser.parse_args(arguments)
    if options.what == "screens":
        from tests.screens import screens  # noqa: PLC0415 - needs a browser

        paths = screens(options.out, options.recording)
    else:
        paths = PLOTS[options.what](options.out)
    print("\n".join(map(str, paths)))


if __name__ == "__main__":
    main()
