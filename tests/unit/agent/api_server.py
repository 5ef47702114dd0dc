"""A stand-in for the Kubernetes API server: lists and watches of pods in its wire format, and its ways to fail."""

import json
import queue
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


def pod(name, uid, *, node="n1", labels=None, annotations=None):
    """A pod as the API server prints it, cut to the fields that matter and one that the agent ignores."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "ml",
            "uid": uid,
            "resourceVersion": "1",
            "labels": labels or {},
            "annotations": annotations or {},
            "creationTimestamp": "2024-01-01T00:00:00Z",
        },
        "spec": {"nodeName": node, "containers": [{"name": "train", "image": "train"}]},
        "status": {"phase": "Running"},
    }


def status(code, reason, message):
    return {
        "apiVersion": "v1",
        "kind": "Status",
        "metadata": {},
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }


REFUSALS = {
    401: status(401, "Unauthorized", "Unauthorized"),
    403: status(403, "Forbidden", 'pods is forbidden: User "system:serviceaccount:prefetchd" cannot list'),
    500: status(500, "InternalError", "etcd is away"),
}


class ApiServerStandIn:
    """Serves on loopback. Attributes change its behaviour while it runs; `requests` keeps what was asked."""

    def __init__(self, port=0, certificate=None):
        self.pods = {}
        self.version = 10
        self.token = "token-1"
        self.refuse = 0
        self.delay = 0.0
        self.end_watches = False
        self.garbage = False
        self.requests = []
        self.events = queue.Queue()
        self._open = []
        self._server = _Server(("127.0.0.1", port), _handler(self))
        self._server.owner = self
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def put(self, item, kind="ADDED"):
        """Change a pod and tell the watchers."""
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        if kind == "DELETED":
            self.pods.pop(item["metadata"]["uid"], None)
        else:
            self.pods[item["metadata"]["uid"]] = item
        self.events.put({"type": kind, "object": item})

    def forget_history(self):
        """Answer the running watch with 410 Gone, as after a compaction."""
        self.events.put({"type": "ERROR", "object": status(410, "Expired", "too old resource version: 10 (20)")})

    def asked(self, watch):
        return [request for request in self.requests if request["watch"] == watch]

    def close(self):
        """Stop as a crashed server does: open watches break off."""
        self._server.shutdown()
        self._server.server_close()
        for connection in self._open:
            try:
                connection.shutdown(2)
            except OSError:
                continue
        self._thread.join(timeout=5)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def process_request(self, request, client_address):
        self.owner._open.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request, client_address):
        """A client that went away is no event."""


def _handler(owner):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            url = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            watch = query.get("watch") == "true"
            token = self.headers.get("Authorization", "")
            owner.requests.append(
                {"path": url.path, "watch": watch, "query": query, "token": token, "at": time.monotonic()}
            )
            time.sleep(owner.delay)
            code = 401 if token != f"Bearer {owner.token}" else owner.refuse
            if code:
                self._send(code, json.dumps(REFUSALS[code]).encode())
            elif owner.garbage:
                self._send(200, b"<html>proxy</html>")
            elif watch:
                self._watch()
            else:
                items = [
                    one
                    for one in owner.pods.values()
                    if f"spec.nodeName={one['spec']['nodeName']}" == query["fieldSelector"]
                ]
                self._send(200, json.dumps(_pod_list(items, owner.version)).encode())

        def _send(self, code, body):
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _watch(self):
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while not owner.end_watches:
                try:
                    event = owner.events.get(timeout=0.05)
                except queue.Empty:
                    continue
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *args):
            """Quiet."""

    return Handler


def _pod_list(items, version):
    return {"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": str(version)}, "items": items}
