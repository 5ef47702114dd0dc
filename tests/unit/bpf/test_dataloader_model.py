"""The inference over played loaders, whose truth is known to the nanosecond."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpf.dataloader_events import NO_TASK, Event, Kind
from bpf.dataloader_model import DataLoaderModel
from tests.unit.bpf.dataloader_script import (
    ITERABLE,
    MS,
    SEQUENTIAL,
    US,
    Loader,
    Script,
    Seen,
    check,
    single,
    train,
)


def uneven(seed):
    dice = random.Random(seed)
    times = [dice.choice((5, 10, 20, 60)) * MS + dice.randrange(MS) for _ in range(997)]
    return lambda task: times[task % len(times)]


def depth_error(iterations, truth):
    return sum(abs(seen.depth - batch.depth) for seen, batch in zip(iterations, truth, strict=True)) / len(truth)


def takeable_error(iterations, truth):
    return sum(abs(seen.takeable - batch.takeable) for seen, batch in zip(iterations, truth, strict=True)) / len(truth)


def hidden(truth):
    """The share of batches after which others were ready, but not the next."""
    return sum(batch.takeable == 0 < batch.depth for batch in truth) / len(truth)


def wait_error(stream, truth):
    return stream.wait_ns / sum(batch.got - batch.asked for batch in truth) - 1


@pytest.mark.parametrize("hooks", [True, False])
@pytest.mark.parametrize(("workers", "prefetch"), [(1, 2), (2, 2), (4, 4), (3, 1)])
def test_iterations_depth_wait_and_capacity(hooks, workers, prefetch):
    script = Script(hooks=hooks)
    loader = Loader(script, workers=workers, prefetch=prefetch, load=uneven(workers))
    truth = train(script, loader.iterate(100))
    script.end()
    stream, iterations = Seen(script.events()).only()
    assert stream.iterations == len(iterations) == 100
    assert stream.capacity == workers * prefetch
    assert (stream.cgroup_id, stream.source, stream.epoch) == (7, "dataloader", 1)
    assert stream.grade == ("U" if hooks else "S2")
    assert depth_error(iterations, truth) <= 0.05
    assert takeable_error(iterations, truth) <= 0.1
    assert workers == 1 or hidden(truth) > 0.05
    assert abs(wait_error(stream, truth)) <= 0.05


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    hooks=st.booleans(),
    workers=st.integers(1, 5),
    prefetch=st.integers(1, 4),
    batches=st.integers(1, 60),
    epochs=st.integers(1, 3),
    persistent=st.booleans(),
    iterable=st.booleans(),
    in_order=st.booleans(),
    compute=st.sampled_from((0, MS, 30 * MS)),
    slowest=st.sampled_from((90 * US, 12 * MS)),
)
def test_count_is_exact_whatever_the_schedule(
    *, seed, hooks, workers, prefetch, batches, epochs, persistent, iterable, in_order, compute, slowest
):
    """Threads that send are slow as well: the last task of an epoch may be seen after the next one has begun."""
    script = Script(hooks=hooks)
    dice = random.Random(seed)
    share = [batches // workers + (worker < batches % workers) for worker in range(workers)] if iterable else None
    loader = Loader(
        script,
        workers=workers,
        prefetch=prefetch,
        load=uneven(seed),
        share=share,
        head=ITERABLE if iterable else SEQUENTIAL,
        persistent=persistent,
        in_order=in_order,
        lag=lambda task: dice.randrange(20 * US, 90 * US if 0 <= task < workers * prefetch else slowest),
    )
    truth = [batch for _ in range(epochs) for batch in train(script, loader.iterate(batches), compute)]
    script.end()
    stream, iterations = Seen(script.events()).only()
    assert stream.iterations == len(truth)
    assert stream.epoch == epochs
    if hooks:
        assert (
            max(abs(seen.time_ns - batch.got) for seen, batch in zip(iterations[-64:], truth[-64:], strict=True)) == 0
        )


@pytest.mark.parametrize("grade", ["U", "S1", ""])
def test_pin_memory_thread_reads_ahead(grade):
    script = Script(hooks=grade == "U", pinned=True)
    loader = Loader(script, load=uneven(3))
    truth = train(script, loader.iterate(80)) + train(script, loader.iterate(80))
    script.end()
    model = DataLoaderModel()
    model.see_waits(sees=grade == "S1")
    stream, iterations = Seen(script.events(), model=model).only()
    assert (stream.iterations, stream.capacity, stream.grade) == (len(truth), 4, grade)
    assert depth_error(iterations, truth) <= 0.1
    if grade:
        assert abs(wait_error(stream, truth)) <= 0.05
    else:
        assert stream.wait_ns is None


@pytest.mark.parametrize("hooks", [True, False])
def test_a_loader_that_gives_batches_in_any_order_can_take_all_that_is_ready(hooks):
    """From the first batch on that was not the next one."""
    script = Script(hooks=hooks)
    loader = Loader(script, workers=4, prefetch=2, load=uneven(6), in_order=False)
    truth = train(script, loader.iterate(100)) + train(script, loader.iterate(100))
    script.end()
    _, iterations = Seen(script.events()).only()
    assert sum(batch.takeable > 0 for batch in truth) > 20
    assert all(seen.takeable == seen.depth for seen in iterations[100:])
    assert takeable_error(iterations, truth) <= 0.1


def test_waits_for_the_pin_memory_thread_are_asked_for_where_nothing_else_shows_them():
    for hooks in (True, False):
        script = Script(hooks=hooks, pinned=True)
        train(script, Loader(script).iterate(10))
        model = DataLoaderModel()
        Seen([event for event in script.events() if event.kind != Kind.CONTROL], model=model)
        assert model.needs_waits != hooks
    script = Script()
    train(script, Loader(script).iterate(10))
    assert not Seen(script.events()[:-1]).model.needs_waits


@pytest.mark.parametrize("persistent", [True, False])
def test_pinned_epoch_broken_off_is_told_from_one_that_ended(persistent):
    """The thread may have read all that is left in either case."""
    script = Script(pinned=True)
    loader = Loader(script, load=lambda task: 2 * MS, persistent=persistent)
    for _ in range(3):
        train(script, loader.iterate(40, take=25), compute=30 * MS)
        train(script, loader.iterate(40), compute=30 * MS)
    script.end()
    stream, _ = Seen(script.events()).only()
    assert stream.iterations == 3 * 65


@pytest.mark.parametrize("hooks", [True, False])
def test_loader_consumed_by_a_thread_of_its_own(hooks):
    script = Script(hooks=hooks, thread=133)
    truth = train(script, Loader(script).iterate(30))
    script.end()
    stream, iterations = Seen(script.events()).only()
    assert stream.iterations == 30
    assert (stream.wait_ns, stream.grade) == (None, "")
    assert depth_error(iterations, truth) <= 0.1


@pytest.mark.parametrize("hooks", [True, False])
@pytest.mark.parametrize("persistent", [True, False])
def test_epochs_broken_off_leave_no_trace(hooks, persistent):
    script = Script(hooks=hooks)
    loader = Loader(script, persistent=persistent, load=uneven(5))
    for _ in range(4):
        train(script, loader.iterate(50, take=17))
    script.end()
    stream, _ = Seen(script.events()).only()
    assert (stream.iterations, stream.epoch) == (4 * 17, 4)


@pytest.mark.parametrize("told_after", [30 * US, 300 * US, 500 * US])
def test_what_is_thrown_away_of_an_epoch_is_not_counted(told_after):
    """The loop reads some of it before the workers are seen to be told."""
    script = Script()
    loader = Loader(script, persistent=True, load=lambda task: 2 * MS)
    loader.lag = lambda task: told_after if task == NO_TASK else 30 * US
    for _ in range(4):
        train(script, loader.iterate(50, take=17), compute=30 * MS)
    script.end()
    stream, iterations = Seen(script.events()).only()
    assert (stream.iterations, stream.epoch, len(iterations)) == (4 * 17, 4, 4 * 17)


def test_last_batch_of_an_epoch_broken_off_counts_although_its_task_is_sent_late():
    script = Script()
    loader = Loader(script, persistent=True, load=lambda task: 60 * MS)
    loader.lag = lambda task: 40 * MS if task == 16 + 4 else 30 * US
    for _ in range(3):
        train(script, loader.iterate(50, take=17))
    script.end()
    stream, _ = Seen(script.events()).only()
    assert (stream.iterations, stream.epoch) == (3 * 17, 3)


@pytest.mark.parametrize("hooks", [True, False])
@pytest.mark.parametrize("persistent", [True, False])
def test_validation_is_told_from_training(hooks, persistent):
    script = Script(hooks=hooks)
    training = Loader(script, persistent=persistent)
    checking = Loader(script, persistent=persistent, head=SEQUENTIAL)
    for _ in range(3):
        train(script, training.iterate(30))
        check(script, checking.iterate(8))
    seen = Seen(script.events(), after=3_000 * MS)
    assert sorted((stream.validation, stream.iterations, stream.epoch) for stream in seen.last.values()) == [
        (False, 90, 3),
        (True, 24, 3),
    ]


@pytest.mark.parametrize("hooks", [True, False])
def test_sanity_check_before_training_is_found_out_later(hooks):
    script = Script(hooks=hooks)
    check(script, Loader(script, head=SEQUENTIAL).iterate(8, take=2))
    first = Seen(script.events())
    assert [stream.validation for stream in first.last.values()] == [False]
    train(script, Loader(script).iterate(30))
    check(script, Loader(script, head=SEQUENTIAL).iterate(8))
    seen = Seen(script.events())
    assert sorted((stream.validation, stream.iterations) for stream in seen.last.values()) == [(False, 30), (True, 10)]


def test_two_loaders_that_feed_one_step_both_train():
    script = Script()
    pairs = zip(Loader(script).iterate(40), Loader(script, head=SEQUENTIAL).iterate(30), strict=False)
    for _ in pairs:
        script.now += 5 * MS
    seen = Seen(script.events())
    assert [stream.validation for stream in seen.last.values()] == [False, False]


@pytest.mark.parametrize("load", [20 * MS, 300 * US])
def test_loader_without_workers(load):
    script = Script(hooks=True)
    truth = [batch for _ in range(3) for batch in train(script, single(script, 25, load))]
    script.end()
    stream, _ = Seen(script.events()).only()
    assert (stream.iterations, stream.epoch, stream.grade) == (75, 3, "U")
    assert (stream.depth, stream.capacity) == (None, None)
    assert abs(wait_error(stream, truth)) <= 0.001


@pytest.mark.parametrize("every", [1, 4])
def test_validation_without_workers(every):
    """Gradients may be accumulated over some batches; more than twice as many without a step are validation."""
    script = Script(hooks=True)
    for _ in range(3):
        for number, _ in enumerate(single(script, 24), 1):
            script.now += 5 * MS
            if number % every == 0:
                script.step()
        check(script, single(script, 20))
    script.end()
    seen = Seen(script.events())
    assert sorted((stream.validation, stream.iterations) for stream in seen.last.values()) == [(False, 72), (True, 60)]


def after(events, time_ns):
    return [event for event in events if event.time_ns > time_ns]


def test_hooks_that_are_lost_leave_the_pipes_to_tell():
    script = Script(hooks=True)
    truth = train(script, Loader(script).iterate(60))
    script.hooks = False
    truth += train(script, Loader(script).iterate(200))
    script.end()
    stream, iterations = Seen(script.events()).only()
    assert stream.grade == "S2"
    assert 0 <= len(truth) - stream.iterations <= 20
    assert depth_error(iterations[-100:], truth[-100:]) <= 0.1


@pytest.mark.parametrize("hooks", [True, False])
@pytest.mark.parametrize("load", [8 * MS, 20 * MS])
def test_late_attach_counts_at_once_and_learns_the_depth(hooks, load):
    script = Script(hooks=hooks)
    loader = Loader(script, workers=3, prefetch=2, load=lambda task: load + task % 5 * MS)
    truth = train(script, loader.iterate(200)) + train(script, loader.iterate(50))
    half = truth[100].got + 2 * MS
    seen = Seen(after(script.events(), half))
    stream, iterations = seen.only()
    assert abs(stream.iterations - 149) <= 2
    assert stream.capacity == 6
    known = [seen for seen in iterations if seen.depth is not None]
    assert len(known) >= 149 - 3 * 6
    assert all((seen.depth is None) == (seen.takeable is None) for seen in iterations)
    assert depth_error(iterations[-60:], truth[-60:]) <= 0.05
    assert takeable_error(iterations[-60:], truth[-60:]) <= 0.05


def test_lost_events_cost_the_depth_only_until_the_loop_is_found_again():
    script = Script()
    train(script, Loader(script, load=uneven(9)).iterate(200))
    events = script.events()
    model = DataLoaderModel()
    Seen(events[:400], model=model)
    model.lose()
    assert model.take(0)[0].depth is None
    stream, _ = Seen(events[450:], model=model).only()
    assert abs(stream.iterations - 200) <= 50 // 7 + 5
    assert sum(event.depth is not None for event in stream.recent) >= 0
    assert stream.capacity is not None


def test_threads_that_send_may_be_slower_than_a_quick_worker():
    """Seen under load: the first batch is read before the other workers' first tasks are sent."""
    script = Script()
    loader = Loader(script, load=lambda task: 2 * MS if task == 0 else 20 * MS)
    loader.lag = lambda task: 6 * MS if task in {1, 2, 3} else 30 * US
    first = train(script, loader.iterate(40))
    second = train(script, Loader(script).iterate(40))
    script.end()
    stream, _ = Seen(script.events()).only()
    assert (stream.iterations, stream.epoch, stream.capacity) == (len(first + second), 2, 4)


def test_workers_without_a_name_are_known_by_their_parent():
    script = Script(named=False)
    truth = train(script, Loader(script).iterate(30))
    stream, iterations = Seen(script.events()).only()
    assert stream.iterations == 30
    assert depth_error(iterations, truth) <= 0.1


def test_other_users_of_multiprocessing_are_no_loaders():
    """A pool's tasks and results are numbered as well, but its processes do not poll."""
    script = Script(named=False)
    for number, task in enumerate(range(100)):
        pid = 2000 + number % 2
        script.tell(Kind.WRITE, script.now, pipe=1, task=task)
        script.tell(Kind.READ, script.now + US, pipe=1, task=task, process=pid)
        script.tell(Kind.WRITE, script.now + 2 * US, pipe=2, task=task, process=pid)
        script.tell(Kind.READ, script.now + 3 * US, pipe=2, task=task)
        script.now += MS
    assert Seen(script.events()).last == {}


def test_strangers_do_not_fill_the_memory():
    script, model = Script(named=False), DataLoaderModel()
    for task in range(20_000):
        script.raw.clear()
        script.tell(Kind.WRITE, script.now, pipe=1, task=task)
        script.tell(Kind.READ, script.now, pipe=100 + task, task=task)
        for event in script.raw:
            model.feed(event)
    (trainer,) = model._trainers.values()
    assert [len(loader.queue.outstanding) < 10_000 for loader in trainer.loaders] == [True]
    assert len(model._orphans) <= 1024


def test_waiting_since_while_the_queue_is_empty():
    for hooks in (True, False):
        script = Script(hooks=hooks)
        truth = train(script, Loader(script, workers=1, load=lambda task: 900 * MS).iterate(3))
        middle = (truth[1].asked + truth[1].got) // 2
        stream, _ = Seen([event for event in script.events() if event.time_ns < middle]).only()
        assert abs(stream.waiting_since_ns - truth[1].asked) < 100 * US
        assert stream.iterations == 1
        stream, _ = Seen([event for event in script.events() if event.time_ns < truth[1].got + MS]).only()
        assert stream.waiting_since_ns is None


def test_fed_loop_does_not_wait():
    script = Script(hooks=True)
    train(script, Loader(script, load=lambda task: MS).iterate(20), compute=50 * MS)
    stream, iterations = Seen(script.events()).only()
    assert stream.waiting_since_ns is None
    assert iterations[10].depth == 3


def test_capacity_shrinks_with_the_rest_of_the_epoch():
    """Else each epoch would seem to starve at its end."""
    script = Script()
    loader = Loader(script, workers=2, prefetch=4, load=lambda task: MS)
    train(script, loader.iterate(40, take=37), compute=50 * MS)
    stream, _ = Seen([event for event in script.events() if event.kind != Kind.CONTROL]).only()
    assert (stream.depth, stream.capacity) == (3, 3)


def test_a_loop_with_a_pin_memory_thread_waits_for_the_next_batch_whatever_is_ready_behind_it():
    script = Script(hooks=True, pinned=True)
    loader = Loader(script, load=lambda task: 900 * MS if task == 2 else 10 * MS)
    truth = train(script, loader.iterate(10))
    script.end()
    middle = truth[2].asked + 450 * MS
    stream, _ = Seen([event for event in script.events() if event.time_ns < middle]).only()
    assert (stream.depth, stream.takeable) == (2, 0)
    assert stream.waiting_since_ns == truth[2].asked


def test_between_epochs_the_depth_is_unknown():
    script = Script()
    train(script, Loader(script).iterate(20))
    stream, _ = Seen(script.events()).only()
    assert (stream.depth, stream.capacity) == (None, 4)


def test_ended_process_is_told_once_more_and_then_forgotten():
    script = Script()
    train(script, Loader(script).iterate(20))
    script.end()
    seen = Seen(script.events())
    assert [stream.iterations for stream in seen.last.values()] == [20]
    assert seen.model.take(script.now) == ()
    assert seen.model.processes == set()
    assert not any((seen.model._index_pipes, seen.model._result_pipes, seen.model._writers, seen.model._ended))


def test_processes_of_other_cgroups_are_dropped():
    model = DataLoaderModel()
    for process, cgroup in ((100, 7), (200, 8)):
        script = Script(process=process, cgroup=cgroup, pids=itertools.count(process * 10))
        script.pipes = itertools.count(process * 1000)
        train(script, Loader(script).iterate(10))
        Seen(script.events(), model=model)
    model.keep({8})
    assert {stream.cgroup_id for stream in model.take(0)} == {8}


def test_ranks_are_streams_of_their_own():
    model, events = DataLoaderModel(), []
    for process in (100, 200):
        script = Script(process=process, pids=itertools.count(process * 10), pipes=itertools.count(process * 1000))
        train(script, Loader(script, load=uneven(process)).iterate(process // 10))
        events += script.events()
    seen = Seen(sorted(events, key=lambda event: event.time_ns), model=model)
    assert {name: stream.iterations for name, stream in seen.last.items()} == {"100/0": 10, "200/0": 20}


def test_many_different_loaders_share_a_bounded_number_of_streams():
    script = Script()
    for number in range(30):
        train(script, Loader(script, length=int(40 * 1.4**number)).iterate(5))
    script.end()
    seen = Seen(script.events())
    assert len(seen.last) == 8
    assert sum(stream.iterations for stream in seen.last.values()) == 150


def talk(model, messages):
    """A process that is no trainer sends numbered pickles: (pipe, number) each, a millisecond apart."""
    for at, (pipe, task) in enumerate(messages, 1):
        model.feed(Event(at * MS, at * MS, pipe, 7, 100, 100, 1, 30, task, Kind.WRITE, 0, b"]\x94(K\x01K\x02K\x03"))
    return model._trainers[100]


def test_a_process_that_talks_like_a_loader_for_weeks_takes_no_memory():
    """The workers of a multiprocessing.Pool number their results with gaps, of what the others did."""
    trainer = talk(DataLoaderModel(), [(77, 8 * number) for number in range(20_000)])
    (loader,) = trainer.loaders
    assert len(loader.queue.outstanding) <= 8192
    assert len(loader.queue._missing) <= 200


@pytest.mark.parametrize("step", [0, 1, 1000])
def test_nor_does_one_that_takes_ever_new_pipes(step):
    model = DataLoaderModel()
    trainer = talk(model, [(1000 + number, step * number) for number in range(5000)])
    assert len(trainer.loaders) <= 64
    assert len(model._index_pipes) == sum(len(loader.pipes) for loader in trainer.loaders) <= 5000
    assert max(len(loader.pipes) for loader in trainer.loaders) <= 1024


def test_a_thread_for_each_epoch_is_not_remembered():
    """Some training loops consume each epoch in a thread of its own; what they took from must not stay for ever."""
    script, model = Script(hooks=True), DataLoaderModel()
    for thread in range(1000, 1200):
        begun = len(script.raw)
        train(script, Loader(script).iterate(4))
        for at, event in enumerate(script.raw[begun:], begun):
            if event.process == event.thread == script.process:
                script.raw[at] = event._replace(thread=thread)
    seen = Seen(script.events(), model=model)
    assert seen.only()[0].iterations == 800
    (trainer,) = model._trainers.values()
    assert 1 < len(trainer._last_loader) <= 65


def test_a_trainer_with_the_number_of_a_worker_that_ended_unseen_is_seen():
    """While nobody is managed nothing is told, ends neither."""
    script, model = Script(), DataLoaderModel()
    train(script, Loader(script, workers=1).iterate(3))
    Seen(script.events(), model=model)
    (worker,) = {event.process for event in script.events()} - {script.process}
    model.keep([])
    later = Script(process=worker, pids=itertools.count(50_000), pipes=itertools.count(60_000))
    train(later, Loader(later).iterate(5))
    seen = Seen(later.events(), after=3000 * MS, model=model)
    assert {name: stream.iterations for name, stream in seen.last.items()} == {f"{worker}/0": 5}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_sequence_of_events_breaks_it(data):
    """Events may be lost and pipes reused; the model may be wrong then, but must not fail."""
    script = Script(hooks=True)
    train(script, Loader(script, persistent=True).iterate(12))
    check(script, Loader(script, share=[3, 4], head=ITERABLE).iterate(7))
    train(script, single(script, 5))
    script.end()
    events = script.events()
    kept = data.draw(st.lists(st.integers(0, len(events) - 1), min_size=1, max_size=200))
    model = DataLoaderModel()
    for index in kept:
        model.feed(events[index])
        if index % 7 == 0:
            model.take(events[index].time_ns)
        if index % 31 == 0:
            model.lose()
    for stream in model.take(script.now):
        assert stream.iterations >= 0
        assert stream.depth is None or stream.depth >= 0
