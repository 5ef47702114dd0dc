"""What the dashboards show: the one source of their queries. `generate.py` turns it into Grafana's JSON.

`$instance` is the node, `$job` the training job, `$device` a device; `RATE` is Grafana's own window for rates.
"""

from __future__ import annotations

from dataclasses import dataclass

RATE = "$__rate_interval"
NODE = '{instance=~"$instance"}'
JOB = '{instance=~"$instance", job=~"$job"}'
CAUSE = '{instance=~"$instance", job=~"$job", cause!="none"}'
DEVICE = '{instance=~"$instance", device=~"$device"}'
SLOT = '{instance=~"$instance", job=~"$job", device=~"$device"}'

PROBE_STATES = {0: ("unavailable", "red"), 1: ("degraded", "orange"), 2: ("attached", "green")}
LEVELS = {0: ("critical", "red"), 1: ("danger", "orange"), 2: ("tight", "yellow"), 3: ("healthy", "green")}
LATENCY = (
    "From submission to completion; on a kernel with neither fentry nor kprobes without the wait at the job's own cap."
)
YES_NO = {0: ("no", "text"), 1: ("yes", "green")}


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; `width` in Grafana's 24 columns, `unit` in Grafana's names, `states` maps values to (text, colour)."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    text: str = ""
    kind: str = "timeseries"
    width: int = 12
    stacked: bool = False
    maximum: float | None = None
    states: dict[int, tuple[str, str]] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard; `variables` are the template variables it offers, in order."""

    name: str
    title: str
    text: str
    variables: tuple[str, ...]
    rows: tuple[Row, ...]


def rate(metric: str, selector: str) -> str:
    """Increase per second of a counter."""
    return f"rate({metric}{selector}[{RATE}])"


def quantile(share: float, metric: str, selector: str, by: str) -> str:
    """Quantile of a histogram, kept apart by the given labels."""
    return f"histogram_quantile({share}, sum by ({by}, le) (rate({metric}_bucket{selector}[{RATE}])))"


def one(title: str, expr: str, unit: str = "short", text: str = "", **more: object) -> Panel:
    """A single number."""
    return Panel(title, (Query(expr, title),), unit, text, "stat", 4, **more)  # type: ignore[arg-type]


def lines(title: str, expr: str, legend: str, unit: str = "short", text: str = "", **more: object) -> Panel:
    """A curve per series of one query."""
    return Panel(title, (Query(expr, legend),), unit, text, **more)  # type: ignore[arg-type]


def states(title: str, expr: str, legend: str, known: dict[int, tuple[str, str]], text: str = "") -> Panel:
    """A band per series, coloured by state."""
    return Panel(title, (Query(expr, legend),), "short", text, "state-timeline", states=known)


NODE_DASHBOARD = Dashboard(
    "node",
    "prefetchd / node",
    "How the training jobs of a node do, and what its devices are asked for.",
    ("instance",),
    (
        Row(
            "Now",
            (
                one("Training jobs", f"sum(prefetchd_jobs{NODE})"),
                one("Lowest score", f"min(prefetchd_health_score{NODE})", text="0 critical, 100 healthy.", maximum=100),
                one("Jobs below 60", f"count(prefetchd_health_score{NODE} < 60) or vector(0)"),
                one("Time waited for data", f"avg({rate('prefetchd_wait_seconds_total', NODE)})", "percentunit"),
                one("Nodes that enforce", f"sum(prefetchd_enforcing{NODE})"),
                one("Agents", f"count(prefetchd_build_info{NODE})"),
            ),
        ),
        Row(
            "Training jobs",
            (
                lines("Health score", f"prefetchd_health_score{NODE}", "{{instance}} {{job}}", maximum=100),
                lines("Time waited for data", rate("prefetchd_wait_seconds_total", NODE), "{{instance}} {{job}}",
                      "percentunit", "Share of the time that the training loop stood before an empty queue."),
                lines("Starvation by cause", f"sum by (cause) ({rate('prefetchd_starvation_events_total', NODE)}) > 0",
                      "{{cause}}", "ops", "Episodes a second in which a queue was found empty.", stacked=True),
                lines("Iterations", rate("prefetchd_iterations_total", NODE), "{{instance}} {{job}}", "ops"),
            ),
        ),
        Row(
            "Devices",
            (
                lines("Bytes", f"sum by (instance, device, op) ({rate('prefetchd_io_bytes_total', NODE)})",
                      "{{instance}} {{device}} {{op}}", "Bps"),
                lines("Request latency, 99th percentile",
                      quantile(0.99, "prefetchd_io_latency_seconds", NODE, "instance, device, op"),
                      "{{instance}} {{device}} {{op}}", "s", LATENCY),
                lines("Capacity", f"prefetchd_device_capacity_bytes_per_second{NODE}",
                      "{{instance}} {{device}} {{op}}", "Bps", "From the configuration or `prefetchd calibrate`."),
                lines("Elastic pool on loan", f"prefetchd_pool_lent_ratio{NODE} / prefetchd_pool_capacity_ratio{NODE}",
                      "{{instance}} {{device}}", "percentunit", maximum=1),
            ),
        ),
        Row(
            "Remote storage",
            (
                lines("NFS latency, 99th percentile",
                      quantile(0.99, "prefetchd_nfs_latency_seconds", NODE, "instance, op"),
                      "{{instance}} {{op}}", "s"),
                lines("Object-store latency, 99th percentile",
                      quantile(0.99, "prefetchd_object_latency_seconds", NODE, "instance"), "{{instance}}", "s"),
                lines("Packets by interface", rate("prefetchd_interface_packets_total", NODE),
                      "{{instance}} {{device}}", "pps"),
                lines("Segments sent again to object stores",
                      f"sum by (instance) ({rate('prefetchd_object_retransmits_total', NODE)})", "{{instance}}", "pps"),
            ),
        ),
    ),
)  # fmt: skip

JOB_DASHBOARD = Dashboard(
    "job",
    "prefetchd / job",
    "Why one training job waits, and what it gets against what it needs.",
    ("instance", "job"),
    (
        Row(
            "Health",
            (
                lines("Score", f"prefetchd_health_score{JOB}", "{{job}}", maximum=100),
                states("Level", f"prefetchd_health_level{JOB}", "{{job}}", LEVELS),
                Panel("Cause", (Query(f"prefetchd_diagnosis{CAUSE} == 1", "{{job}} {{cause}}"),), kind="state-timeline",
                      text="The most likely cause of starvation.", states={1: ("present", "orange")}),
                states("Local bandwidth can help", f"prefetchd_actionable{JOB}", "{{job}}", YES_NO),
                lines("Confidence", f"prefetchd_health_confidence{JOB}", "{{job}}", "percentunit",
                      "Weight of the health metrics that could be measured.", maximum=1),
                lines("Starvation by cause",
                      f"sum by (job, cause) ({rate('prefetchd_starvation_events_total', JOB)}) > 0",
                      "{{job}} {{cause}}", "ops", stacked=True),
            ),
        ),
        Row(
            "Training loop",
            (
                Panel("Prefetch queue", (Query(f"prefetchd_queue_depth{JOB}", "{{job}} depth"),
                      Query(f"prefetchd_queue_takeable{JOB}", "{{job}} in order"),
                      Query(f"prefetchd_queue_capacity{JOB}", "{{job}} capacity")),
                      text="Batches ready, those of them that the loop can take now, and room."),
                lines("Time waited for data", rate("prefetchd_wait_seconds_total", JOB), "{{job}}", "percentunit"),
                lines("Iterations", rate("prefetchd_iterations_total", JOB), "{{job}}", "ops"),
                Panel("Iteration", (Query(f"prefetchd_compute_seconds{JOB}", "{{job}} compute"),
                      Query(f"{rate('prefetchd_wait_seconds_total', JOB)} / {rate('prefetchd_iterations_total', JOB)}",
                            "{{job}} wait")), "s"),
                lines("Next batch", f"prefetchd_next_batch_bytes{JOB}", "{{job}}", "bytes"),
                lines("Page-cache hits", f"prefetchd_cache_hit_ratio{JOB}", "{{job}}", "percentunit", maximum=1),
            ),
        ),
        Row(
            "Storage",
            (
                Panel("Bandwidth: need, cap, reads",
                      (Query(f"prefetchd_need_bytes_per_second{JOB}", "{{job}} {{device}} need"),
                       Query(f"prefetchd_quota_bytes_per_second{JOB}", "{{job}} {{device}} cap"),
                       Query(f"sum by (job, device, op) ({rate('prefetchd_io_bytes_total', JOB)})",
                             "{{job}} {{device}} {{op}}")), "Bps"),
                Panel("Share of the device",
                      (Query(f"prefetchd_entitlement_ratio{JOB}", "{{job}} {{device}} entitled"),
                       Query(f"prefetchd_loan_ratio{JOB}", "{{job}} {{device}} on loan")), "percentunit"),
                Panel("Request latency",
                      (Query(quantile(0.5, "prefetchd_io_latency_seconds", JOB, "job, device, op"),
                             "{{job}} {{device}} {{op}} median"),
                       Query(quantile(0.99, "prefetchd_io_latency_seconds", JOB, "job, device, op"),
                             "{{job}} {{device}} {{op}} p99")), "s", LATENCY),
                lines("Requests waiting at the job's own cap", rate("prefetchd_io_throttle_wait_seconds_total", JOB),
                      "{{job}} {{device}} {{op}}", text="Mean number in blk-throttle: seconds waited per second. Empty "
                      "on a kernel with neither fentry nor kprobes: there it is unknown."),
                lines("Requests in flight", f"prefetchd_io_in_flight{JOB}", "{{job}} {{device}} {{op}}"),
                lines("Queueing share of remote requests", f"prefetchd_nfs_queueing_ratio{JOB}", "{{job}}",
                      "percentunit", maximum=1),
                lines("NFS latency, 99th percentile",
                      quantile(0.99, "prefetchd_nfs_latency_seconds", JOB, "job, op"), "{{job}} {{op}}", "s"),
                lines("Object-store latency, 99th percentile",
                      quantile(0.99, "prefetchd_object_latency_seconds", JOB, "job"), "{{job}}", "s"),
                lines("Round trip to object stores", f"prefetchd_object_round_trip_seconds{JOB}", "{{job}}", "s",
                      "Mean of the open connections, as TCP smooths it."),
                Panel("Connections to object stores",
                      (Query(f"prefetchd_object_connections{JOB}", "{{job}} open"),
                       Query(rate("prefetchd_object_retransmits_total", JOB), "{{job}} segments sent again a second"))),
                lines("FUSE latency, 99th percentile",
                      quantile(0.99, "prefetchd_fuse_latency_seconds", JOB, "job, op"), "{{job}} {{op}}", "s"),
            ),
        ),
    ),
)  # fmt: skip

CONTROLLER_DASHBOARD = Dashboard(
    "controller",
    "prefetchd / controller",
    "What the agent decides and writes, and how it is itself.",
    ("instance", "device"),
    (
        Row(
            "Control",
            (
                states("Gate", f"prefetchd_gate_open{DEVICE}", "{{instance}} {{device}}",
                       {0: ("closed", "text"), 1: ("open", "orange")}, "Open while a victim keeps control active."),
                Panel("Elastic pool", (Query(f"prefetchd_pool_lent_ratio{DEVICE}", "{{device}} on loan"),
                      Query(f"prefetchd_pool_capacity_ratio{DEVICE}", "{{device}} capacity")), "percentunit",
                      "Jobs below 60 borrow; what nobody borrows serves best effort until somebody does."),
                lines("Controller error", f"prefetchd_pid_error{DEVICE}", "{{job}} {{device}}",
                      text="Target less score."),
                lines("Controller output", f"prefetchd_pid_output{DEVICE}", "{{job}} {{device}}", "percentunit",
                      "Relative change of the quota, at most 20 % a step."),
                Panel("Controller terms",
                      tuple(Query(f"prefetchd_pid_{term}{DEVICE}", "{{job}} {{device}} " + term)
                            for term in ("proportional", "integral", "derivative")), "percentunit"),
                lines("Loans", f"prefetchd_loan_ratio{DEVICE} > 0", "{{job}} {{device}}", "percentunit",
                      "What each job has borrowed of the elastic pool; together all that is on loan.", stacked=True),
            ),
        ),
        Row(
            "Reading ahead on disks that seek",
            (
                states("Active", f"prefetchd_rearrange_active{DEVICE}", "{{instance}} {{job}} {{device}}", YES_NO),
                lines("Read ahead", rate("prefetchd_rearrange_bytes_total", DEVICE), "{{job}} {{device}}", "Bps"),
                lines("Used of what was read ahead", f"prefetchd_rearrange_hit_ratio{DEVICE}", "{{job}} {{device}}",
                      "percentunit", maximum=1),
                lines("Wait saved per iteration", f"prefetchd_rearrange_gain_seconds{DEVICE}", "{{job}} {{device}}",
                      "s"),
                lines("Files left out", f"prefetchd_rearrange_skips_total{NODE}", "{{instance}} {{cause}}"),
                lines("Ends", f"prefetchd_rearrange_stops_total{NODE}", "{{instance}} {{cause}}"),
            ),
        ),
        Row(
            "Making files contiguous",
            (
                states("Active", f"prefetchd_defragment_active{DEVICE}", "{{instance}} {{job}} {{device}}", YES_NO),
                lines("Moved", rate("prefetchd_defragment_bytes_total", JOB), "{{job}}", "Bps"),
                Panel("Files", (Query(f"prefetchd_defragment_files_total{JOB}", "{{job}} moved"),
                                Query(f"prefetchd_defragment_files_left{JOB}", "{{job}} left"))),
                lines("Wait saved per iteration", f"prefetchd_defragment_gain_seconds{JOB}", "{{job}}", "s"),
                lines("Files left as they are", f"prefetchd_defragment_skips_total{NODE}", "{{instance}} {{cause}}"),
                lines("Ends", f"prefetchd_defragment_stops_total{NODE}", "{{instance}} {{cause}}"),
            ),
        ),
        Row(
            "Writes",
            (
                lines("Writes to control files by result",
                      f"sum by (instance, result) ({rate('prefetchd_control_writes_total', NODE)})",
                      "{{instance}} {{result}}", "ops", stacked=True),
                Panel("Conflicts and restores", (Query(f"prefetchd_control_conflicts_total{NODE}",
                      "{{instance}} given up to another writer"),
                      Query(f"prefetchd_restores_total{NODE}", "{{instance}} restored"))),
            ),
        ),
        Row(
            "The agent itself",
            (
                states("Probes", f"prefetchd_probe_status{NODE}", "{{instance}} {{probe}}", PROBE_STATES),
                lines("Events lost", rate("prefetchd_lost_events_total", NODE), "{{instance}} {{probe}}", "ops"),
                lines("Hints of training code", rate("prefetchd_hints_total", NODE), "{{instance}} {{result}}", "ops",
                      "All that came, those for which senders found no room, and those that do not count, by reason."),
                lines("Fill of probe tables", f"prefetchd_map_fill_ratio{NODE}", "{{instance}} {{probe}}",
                      "percentunit", maximum=1),
                Panel("Pass of the loop", (Query(f"prefetchd_tick_duration_seconds{NODE}", "{{instance}} last"),
                      Query(f"{rate('prefetchd_tick_seconds_total', NODE)} / {rate('prefetchd_ticks_total', NODE)}",
                            "{{instance}} mean")), "s"),
                lines("Time spent in the loop", rate("prefetchd_tick_seconds_total", NODE), "{{instance}}",
                      "percentunit", "Share of one core."),
                lines("CPU", rate("prefetchd_process_cpu_seconds_total", NODE), "{{instance}}", "percentunit",
                      "Share of one core, all threads of the agent."),
                lines("Memory", f"prefetchd_process_resident_memory_bytes{NODE}", "{{instance}}", "bytes"),
                lines("Age of the last pass", f"time() - prefetchd_last_tick_timestamp_seconds{NODE}", "{{instance}}",
                      "s"),
                Panel("Trouble", (Query(rate("prefetchd_job_errors_total", NODE), "{{instance}} job errors a second"),
                      Query(f"prefetchd_jobs_without_series{NODE}", "{{instance}} jobs without series"),
                      Query(rate("prefetchd_rule_violations_total", NODE), "{{instance}} decisions refused"))),
            ),
        ),
    ),
)  # fmt: skip

DASHBOARDS = (NODE_DASHBOARD, JOB_DASHBOARD, CONTROLLER_DASHBOARD)
