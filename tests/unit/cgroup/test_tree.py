import select

import pytest

from cgroup import tree, watch
from cgroup.errors import Vanished
from cgroup.inotify import Event, Inotify


@pytest.fixture
def root(tmp_path):
    for path in ("a/b/c", "a/d", "e"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "a/io.max").write_text("")
    return tmp_path


def test_walk_yields_parents_first_and_folders_only(root):
    paths = [cgroup.path for cgroup in tree.walk(str(root))]
    assert sorted(paths) == ["/", "/a", "/a/b", "/a/b/c", "/a/d", "/e"]
    assert all(paths.index(path.rpartition("/")[0] or "/") < paths.index(path) for path in paths[1:])


def test_ids_are_inodes(root):
    ids = {cgroup.path: cgroup.id for cgroup in tree.walk(str(root))}
    assert ids["/a/b"] == (root / "a/b").stat().st_ino == tree.cgroup_id(str(root), "/a/b")


def test_walk_is_bounded(root):
    assert len(list(tree.walk(str(root), limit=3))) == 3
    assert list(tree.walk(str(root), "/gone")) == []
    assert tree.children(str(root), "/gone") == []
    assert tree.children(str(root), "/a/io.max") == []


def test_find_prefers_the_hint_but_never_trusts_it(root):
    wanted = (root / "a/d").stat().st_ino
    assert tree.find(str(root), wanted, hint="/a/d") == "/a/d"
    assert tree.find(str(root), wanted, hint="/e") == "/a/d"
    assert tree.find(str(root), wanted, hint="/gone") == "/a/d"
    (root / "a/d").rmdir()
    assert tree.find(str(root), wanted, hint="/a/d") is None


def test_a_vanished_cgroup_is_its_own_error(root):
    with pytest.raises(Vanished, match="/a/x"):
        tree.cgroup_id(str(root), "/a/x")


def test_missing_delegation_names_the_ancestors(root):
    (root / "cgroup.subtree_control").write_text("cpu io memory\n")
    (root / "a/cgroup.subtree_control").write_text("cpu\n")
    (root / "a/b/cgroup.subtree_control").write_text("")
    assert tree.missing_delegation(str(root), "/a/b/c") == ("/a", "/a/b")
    assert tree.missing_delegation(str(root), "/e") == ()
    with pytest.raises(Vanished):
        tree.missing_delegation(str(root), "/e/x")


def told(changes):
    return [(change.kind, change.cgroup.path) for change in changes]


@pytest.fixture
def watcher(root):
    watcher = watch.TreeWatch(str(root), scan_seconds=10.0)
    yield watcher
    watcher.close()


def test_the_first_look_reports_everything(watcher):
    assert len(told(watcher.changes(0.0))) == 6
    assert watcher.degraded is None
    assert told(watcher.changes(0.1)) == []


def test_notifications_of_nested_new_cgroups(root, watcher):
    watcher.changes(0.0)
    (root / "e/f/g").mkdir(parents=True)
    assert told(watcher.changes(0.1)) == [("created", "/e/f"), ("created", "/e/f/g")]
    (root / "e/f/g/h").mkdir()
    assert told(watcher.changes(0.2)) == [("created", "/e/f/g/h")]
    assert "/e/f/g/h" in watcher.known


def test_cgroups_at_the_top_come_and_go_any_number_of_times(root, watcher):
    """A slice that empties is removed and made again; the root is the parent of its events, never their subject."""
    watcher.changes(0.0)
    for _ in range(3):
        (root / "batch.slice/job").mkdir(parents=True)
        assert told(watcher.changes(0.1)) == [("created", "/batch.slice"), ("created", "/batch.slice/job")]
        (root / "batch.slice/job").rmdir()
        (root / "batch.slice").rmdir()
        assert told(watcher.changes(0.2)) == [("removed", "/batch.slice"), ("removed", "/batch.slice/job")]
    assert "/" in watcher.known


def test_notifications_wake_a_poller(root, watcher):
    watcher.changes(0.0)
    assert select.select([watcher], [], [], 0)[0] == []
    (root / "e/f").mkdir()
    assert select.select([watcher], [], [], 1)[0] == [watcher]


def test_a_removed_subtree(root, watcher):
    watcher.changes(0.0)
    (root / "a/b/c").rmdir()
    (root / "a/b").rmdir()
    assert sorted(told(watcher.changes(0.1))) == [("removed", "/a/b"), ("removed", "/a/b/c")]
    assert told(watcher.changes(0.2)) == []


def test_a_cgroup_that_vanished_and_reappeared_has_a_new_id(root, watcher):
    watcher.changes(0.0)
    old = watcher.known["/e"].id
    (root / "e").rmdir()
    (root / "hole").mkdir()  # takes the free inode: kernfs never gives a number twice, other file systems do
    (root / "e").mkdir()
    changes = watcher.changes(0.1)
    assert ("removed", "/e") in told(changes)
    assert ("created", "/e") in told(changes)
    assert watcher.known["/e"].id == (root / "e").stat().st_ino != old


def test_an_overflow_leads_to_a_full_look(root, watcher, monkeypatch):
    watcher.changes(0.0)
    (root / "e/f").mkdir()
    monkeypatch.setattr(Inotify, "read", lambda self: [Event(-1, 0x4000)])
    assert told(watcher.changes(0.1)) == [("created", "/e/f")]


def test_scans_stand_in_where_the_kernel_gives_no_watch(root, monkeypatch):
    def refuse(self, path, mask):
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(Inotify, "add", refuse)
    watcher = watch.TreeWatch(str(root), scan_seconds=10.0)
    assert len(watcher.changes(0.0)) == 6
    assert "max_user_watches" in (watcher.degraded or "")
    assert watcher.fileno() == -1
    (root / "e/f").mkdir()
    assert told(watcher.changes(9.9)) == []
    assert told(watcher.changes(10.0)) == [("created", "/e/f")]
    (root / "e/f").rmdir()
    assert told(watcher.changes(20.0)) == [("removed", "/e/f")]
