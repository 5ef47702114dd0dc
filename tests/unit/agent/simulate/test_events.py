from agent.simulate.events import Events


def test_actions_run_in_order_of_time_and_then_of_request():
    events, seen = Events(), []
    events.at(2.0, seen.append, "late")
    events.at(1.0, seen.append, "first")
    events.at(1.0, seen.append, "second")
    assert events.run(3.0) == 3
    assert seen == ["first", "second", "late"]
    assert events.now == 3.0


def test_what_is_due_later_waits():
    events, seen = Events(), []
    events.after(5.0, seen.append, "later")
    events.run(4.0)
    assert seen == []
    events.run(5.0)
    assert seen == ["later"]


def test_a_time_that_has_passed_means_now():
    events, seen = Events(), []
    events.run(3.0)
    events.at(1.0, lambda _: seen.append(events.now))
    events.run(3.0)
    assert seen == [3.0]
