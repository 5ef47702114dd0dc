"""The shipped configuration and the built-in settings of the core are the same numbers."""

from pathlib import Path

from agent.config import Config, load, parse
from agent.health import HealthSettings
from agent.pid import GAINS_BY_MEDIUM
from agent.policies.base import PolicySettings
from agent.settings import core_settings, policy_settings
from agent.types import Medium

DEFAULT = Path(__file__).parents[3] / "packaging" / "prefetchd.toml"


def test_defaults_agree():
    assert core_settings(Config()).health == HealthSettings()
    assert policy_settings(load(DEFAULT)) == PolicySettings()


def test_gains_in_the_shipped_comments_are_the_built_in_ones():
    text = DEFAULT.read_text()
    section = text[text.index("[pid.ssd]") : text.index("[enforcement]")].replace("# k", "k")
    gains = policy_settings(parse(section)).gains
    assert gains == dict(GAINS_BY_MEDIUM)


def test_one_gain_and_scaled_weights():
    config = parse("[pid.hdd]\nki = 0.5\n[health]\nqueue_weight = 0.9\nlatency_weight = 0.4\nvariation_weight = 0.2")
    assert policy_settings(config).gains[Medium.HDD].ki == 0.5
    assert policy_settings(config).gains[Medium.HDD].kp == GAINS_BY_MEDIUM[Medium.HDD].kp
    health = core_settings(config).health
    assert abs(health.queue_weight - 0.9 / 1.75) < 1e-9
