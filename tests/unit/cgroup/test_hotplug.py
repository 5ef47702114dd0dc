import socket

from cgroup.hotplug import DeviceChange, DeviceWatch, parse_uevent
from tests.unit.cgroup.fuzzing import variants

ADD = b"add@/devices/pci/ata1/block/sdb\0ACTION=add\0SUBSYSTEM=block\0MAJOR=8\0MINOR=16\0DEVNAME=sdb\0DEVTYPE=disk\0"


def test_a_disk_is_added():
    assert parse_uevent(ADD) == DeviceChange("add", "8:16", "sdb")


def test_partitions_other_subsystems_and_udev_are_not_ours():
    assert parse_uevent(ADD.replace(b"=disk", b"=partition")) is None
    assert parse_uevent(ADD.replace(b"=block", b"=net")) is None
    assert parse_uevent(b"libudev\0\xfe\xed\xca\xfe") is None
    assert parse_uevent(b"") is None


def test_nothing_in_a_message_raises():
    told = [parse_uevent(text.encode(errors="surrogatepass")) for text in variants([ADD.decode()], 2000)]
    assert any(told)
    assert None in told


class FakeSocket:
    def __init__(self, answers):
        self.answers = answers

    def recv(self, size):
        answer = self.answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def close(self):
        self.answers = None


def test_lost_messages_are_told():
    watch = DeviceWatch()
    watch.close()
    watch._socket = FakeSocket(
        [ADD, OSError(105, "No buffer space available"), b"libudev", BlockingIOError(11, "again")]
    )
    assert [change.action for change in watch.changes()] == ["add", "overflow"]


def test_a_socket_that_fails_is_given_up():
    watch = DeviceWatch()
    watch.close()
    watch._socket = FakeSocket([ADD, OSError(9, "Bad file descriptor")])
    assert [change.action for change in watch.changes()] == ["add"]
    assert "Bad file descriptor" in watch.degraded
    assert watch.changes() == ()


def test_a_host_without_these_messages(monkeypatch):
    def refuse(*arguments):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "socket", refuse)
    watch = DeviceWatch()
    assert "Operation not permitted" in (watch.degraded or "")
    assert watch.fileno() == -1
    assert watch.changes() == ()


def test_the_real_socket_opens_and_is_quiet_or_tells_disks():
    watch = DeviceWatch()
    assert watch.degraded is None
    assert watch.fileno() > 0
    assert all(change.device for change in watch.changes())
    watch.close()
