"""From the configuration to the settings of every stage of the control core. Pure."""

from __future__ import annotations

from dataclasses import replace

from agent.config import Config, GainsSection
from agent.core import CoreSettings
from agent.health import HealthSettings
from agent.pid import GAINS_BY_MEDIUM, PidGains
from agent.policies.base import PolicySettings
from agent.pool import PoolSettings
from agent.rearrange.pay import PaySettings
from agent.rearrange.stop import StopSettings
from agent.signals import SignalSettings
from agent.types import Medium

MOVE_WINDOW_SECONDS = 10.0
"""Moving goes on for minutes at a small part of the disk: what others wait in 2 s is chance more than that."""


def core_settings(config: Config) -> CoreSettings:
    """Settings of signals and health; the health weights are scaled to sum to 1."""
    health = config.health
    total = health.queue_weight + health.latency_weight + health.variation_weight + health.demand_weight
    return CoreSettings(
        signals=SignalSettings(
            starvation_seconds=health.starvation_seconds,
            smoothing_seconds=health.smoothing_seconds,
            timer_seconds=config.loop.timer_seconds,
        ),
        health=HealthSettings(
            queue_weight=health.queue_weight / total,
            latency_weight=health.latency_weight / total,
            variation_weight=health.variation_weight / total,
            demand_weight=health.demand_weight / total,
            smoothing_seconds=health.smoothing_seconds,
            blocked_seconds=health.starvation_seconds,
        ),
    )


def policy_settings(config: Config) -> PolicySettings:
    """Settings of the policy: pool, gains by medium, bounds of caps."""
    pool = config.pool
    iterations = {Medium.SSD: pool.ssd_loan_iterations, Medium.HDD: pool.hdd_loan_iterations}
    gains = dict(GAINS_BY_MEDIUM)
    gains[Medium.SSD] = _gains(config.pid.ssd, gains[Medium.SSD])
    gains[Medium.HDD] = _gains(config.pid.hdd, gains[Medium.HDD])
    return PolicySettings(
        pool=PoolSettings(
            loan_iterations={**PoolSettings().loan_iterations, **iterations}, loan_seconds=pool.loan_seconds
        ),
        gains=gains,
        floor=config.enforcement.floor_ratio,
        timer_seconds=config.loop.timer_seconds,
    )


def stop_settings(config: Config) -> StopSettings:
    """When reading ahead stops, and for how long."""
    return StopSettings(cool_down_seconds=config.rearrange.cool_down_seconds)


def pay_settings(config: Config) -> PaySettings:
    """When making files contiguous stops, and for how long."""
    return PaySettings(replace(stop_settings(config), window_seconds=MOVE_WINDOW_SECONDS))


def _gains(section: GainsSection, default: PidGains) -> PidGains:
    """The medium's own gains, each replaced where the configuration names one."""
    named = {"kp": section.kp, "ki": section.ki, "kd": section.kd}
    return replace(default, **{name: value for name, value in named.items() if value is not None})
