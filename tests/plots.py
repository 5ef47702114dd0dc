"""Plots of the control core, for eyes: `python -m tests.plots pid|policies --out DIR`."""

import argparse
import math
from pathlib import Path

import matplotlib as mpl

from agent.core import Core, CoreSettings
from agent.pid import DEAD_ZONE, GAINS_BY_MEDIUM, TARGET_SCORE, PidState, pid_step
from agent.policies.base import PolicySettings, make_policy
from agent.types import Medium
from tests.unit.agent.closed_loop import MIB, Node, Trainer

mpl.use("Agg")

from matplotlib import pyplot as plt  # the backend comes first

LAGS = {Medium.SSD: 0.3, Medium.HDD: 1.0}


def step_response(medium, seconds=30.0, dt=0.1):
    """A quota of 30 % of the need, at half time a need twice as large: times, scores, quotas, outputs.

    The score follows the quota with the medium's lag: 100 * (1 - exp(-1.4 * quota / need)).
    """
    quota, score, state = 0.3, 0.0, PidState()
    rows = []
    for n in range(int(seconds / dt)):
        need = 1.0 if n * dt < seconds / 2 else 2.0
        reached = 100.0 * (1.0 - math.exp(-1.4 * quota / need))
        score += (1.0 - math.exp(-dt / LAGS[medium])) * (reached - score)
        state, terms = pid_step(GAINS_BY_MEDIUM[medium], state, TARGET_SCORE - score, dt)
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
    return save(figure, out / "pid-step-response.png")


def run_policy(name, seconds=26.0):
    """Two jobs that starve, one with slack, and from 5 to 20 s a greedy reader: times, scores, rates per job."""
    node = Node(
        [
            Trainer(1, batch=4 * MIB),
            Trainer(2, batch=3 * MIB),
            Trainer(3, batch=1 * MIB, compute=0.2),
            Trainer(9, training=False, streams=32, start=5.0, stop=20.0),
        ]
    )
    core = Core(make_policy(name, PolicySettings()), CoreSettings(signals=node.settings()))
    rows = []
    while node.now < seconds:
        node.advance(0.1)
        samples = {job.id: job.sample(node.now) for job in node.jobs}
        result = core.step(node.now, samples, [job.job() for job in node.jobs], node.devices)
        node.caps = {slot: quota.share for slot, quota in result.decision.quotas.items()}
        scores = {number: report.health.score for number, report in result.reports.items() if report.health}
        rows.append((node.now, scores, {slot[0]: share for slot, share in node.caps.items()}))
    return rows


def plot_policies(out):
    """Scores and caps over time, one column per policy."""
    names = ("paper", "adaptive")
    figure, axes = plt.subplots(2, len(names), sharex=True, figsize=(12, 7))
    for column, name in enumerate(names):
        rows = run_policy(name)
        times = [now for now, _, _ in rows]
        for job in (1, 2, 3):
            axes[0][column].plot(times, [scores.get(job, math.nan) for _, scores, _ in rows], label=f"job {job}")
        for job in (1, 2, 3, 9):
            label = "best effort" if job == 9 else f"job {job}"
            axes[1][column].plot(times, [caps.get(job, math.nan) for _, _, caps in rows], label=label)
        axes[0][column].set_title(name)
        axes[1][column].set_xlabel("time (s)")
    axes[0][0].set_ylabel("score (points)")
    axes[1][0].set_ylabel("cap (share of the device)")
    axes[1][0].legend()
    return save(figure, out / "policies-closed-loop.png")


def save(figure, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


PLOTS = {"pid": plot_pid, "policies": plot_policies}


def main(arguments=None):
    """Draw what is named and say where it is."""
    parser = argparse.ArgumentParser(prog="python -m tests.plots", description=__doc__)
    parser.add_argument("what", choices=sorted(PLOTS))
    parser.add_argument("--out", type=Path, required=True, help="folder for the image")
    options = parser.parse_args(arguments)
    print(PLOTS[options.what](options.out))


if __name__ == "__main__":
    main()
