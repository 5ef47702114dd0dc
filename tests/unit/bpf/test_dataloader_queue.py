"""The counts of one epoch's queue, step by step."""

from bpf.dataloader_queue import Left, Queue

A, B = 1, 2


def primed(capacity=None, tasks=4):
    queue = Queue(capacity)
    for task in range(tasks):
        assert not queue.send(task, (A, B)[task % 2], 2)
    return queue


def take(queue, task):
    """Produced, read and taken in order; then another task is sent for it."""
    queue.produce(task)
    queue.receive(task, waited=True)
    assert queue.takes(task)
    queue.take(task)
    assert queue.send(queue.top + 1, (A, B)[(queue.top + 1) % 2], 2)
    assert not queue.is_silent()


def test_depth_is_what_is_produced_and_not_taken():
    queue = primed()
    for task in (1, 0, 2):
        queue.produce(task)
    assert (queue.depth, queue.primed) == (3, 4)
    take(queue, 0)
    assert (queue.depth, queue.capacity, queue.taken) == (2, 4, 1)


def test_takeable_are_those_ready_from_the_next_in_order_on():
    queue = primed()
    for task, takeable in ((2, 0), (1, 0), (0, 3), (3, 4)):
        queue.produce(task)
        assert queue.takeable == takeable
    take(queue, 0)
    assert queue.left == (3, 3)
    assert queue.left.after_one() == (2, 2)


def test_after_one_never_falls_below_nothing():
    assert Left(2, 0).after_one() == (1, 0)
    assert Left(None, None).after_one() == (None, None)


def test_takeable_is_all_that_is_ready_where_order_does_not_matter():
    queue = primed()
    queue.unordered = True
    queue.produce(2)
    queue.produce(3)
    assert queue.left == (2, 2)


def test_takeable_passes_over_the_tasks_of_a_worker_that_has_ended():
    queue = primed()
    queue.produce(1)
    queue.produce(3)
    assert queue.takeable == 0
    queue.stop(0)
    assert queue.left == (2, 2)


def test_takeable_in_the_last_batches_of_an_epoch():
    queue = primed()
    for task in (3, 2, 1):
        queue.produce(task)
    queue.receive(0, waited=True)
    queue.take(0)
    assert (queue.left, queue.capacity) == ((3, 3), 4)
    queue.take(1)
    assert (queue.left, queue.capacity) == ((2, 2), 2)
    queue.take(2)
    queue.take(3)
    assert (queue.left, queue.is_over()) == ((0, 0), True)


def test_result_out_of_order_is_kept_and_taken_silently():
    queue = primed()
    queue.receive(1, waited=True)
    assert not queue.takes(1)
    take(queue, 0)
    assert queue.depth == 1
    assert queue.send(5, B, 2)
    assert queue.is_silent()
    assert queue.take_silently()
    assert (queue.taken, queue.depth, queue.unordered) == (2, 0, False)


def test_a_task_for_a_batch_that_is_not_next_shows_that_order_does_not_matter():
    queue = primed()
    queue.receive(1, waited=True)
    assert queue.send(4, A, 2)
    assert queue.is_silent()
    assert queue.take_silently()
    assert queue.unordered
    queue.receive(3, waited=True)
    assert queue.takes(3)


def test_confirmation_without_a_batch_to_take_counts_nothing():
    queue = primed()
    assert not queue.take_silently()
    assert queue.taken == 0


def test_late_primers_are_told_by_the_known_capacity():
    queue = Queue(capacity=4)
    queue.send(0, A, 2)
    queue.receive(0, waited=True)
    queue.take(0)
    assert not any(queue.send(task, A, 2) for task in (1, 2, 3))
    assert queue.send(4, A, 2)


def test_exhausted_worker_answers_none_of_its_later_tasks():
    queue = primed()
    queue.stop(1)
    assert queue.has_ended(B)
    assert sorted(queue.outstanding) == [0, 2]
    queue.receive_stop(1)
    assert queue.send(4, A, 2)  # in place of the one that stopped
    assert not queue.is_silent()
    queue.send(5, B, 2)
    assert 5 not in queue.outstanding


def test_span_takes_what_is_left_and_no_more():
    queue = primed(tasks=1)
    queue.produce(0)
    queue.receive(0, waited=True)
    assert queue.take_in_span()
    assert not queue.take_in_span()
    assert queue.is_over()


def test_span_that_gives_another_than_the_next_shows_that_order_does_not_matter():
    queue = primed()
    queue.receive(1, waited=True)
    assert queue.take_in_span()
    assert queue.unordered
    assert queue.next_task() == 0


def test_complete_is_what_has_been_read_to_the_end():
    queue = primed(tasks=2)
    queue.receive(1, waited=True)
    assert not queue.is_complete()
    queue.receive(0, waited=True)
    assert queue.is_complete()


def test_unsettled_until_a_direct_batch_shows_the_distance():
    queue = Queue()
    queue.send(121, B, 1)  # for 117, which nobody saw
    for taken in range(118, 130):
        queue.receive(taken, waited=True)
        assert queue.unsettled
        assert queue.depth is queue.takeable is queue.capacity is None
        assert queue.send(taken + 4, (A, B)[taken % 2], 2)
        assert queue.take_silently()
        if not queue.unsettled:
            break
    assert (queue.primed, queue.capacity) == (4, 4)
    assert min(queue.outstanding) == taken + 1
    assert queue.left == (0, 0)
    queue.produce(taken + 2)
    assert queue.left == (1, 0)
    queue.produce(taken + 1)
    assert queue.left == (2, 2)


def test_unsettled_sets_stay_bounded():
    queue = Queue()
    queue.send(500, A, 1)
    queue.receive(400, waited=False)
    for task in range(501, 5000):
        queue.send(task, A, 1)
    assert len(queue.outstanding) <= 1025


def test_expects_only_numbers_that_are_missing_or_about_to_come():
    queue = Queue()
    queue.send(2, A, 1)
    assert queue.expects(0)
    queue.send(0, B, 1)
    assert queue.expects(1)
    assert not queue.expects(0)
    assert queue.expects(3)
    assert not queue.expects(300)
    assert not Queue().expects(0)


def test_first_task_may_come_last_where_the_start_was_seen():
    for from_start in (True, False):
        queue = Queue(4, from_start=from_start)
        queue.send(1, B, 2)
        assert queue.is_starting != from_start
        queue.receive(1, waited=True)
        assert queue.unsettled != from_start
        assert queue.expects(0) == from_start
        queue.unsettle()
        assert not queue.expects(0)


def test_another_epoch_begins_with_task_0_only_if_that_was_there_before():
    queue = Queue()
    queue.send(1, B, 1)
    assert not queue.has_begun
    queue.send(0, A, 2)
    assert queue.has_begun
