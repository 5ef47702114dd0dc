"""A stand-in for a cluster's API server as Helm sees it: discovery, and objects that are kept or refused."""

import json
import re
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import kubernetes_validate
import yaml

KUBERNETES = "1.33"
OPERATOR = "monitoring.coreos.com"
RESOURCES = {
    "v1": {
        "Namespace": ("namespaces", False),
        "ServiceAccount": ("serviceaccounts", True),
        "Secret": ("secrets", True),
        "ConfigMap": ("configmaps", True),
        "Service": ("services", True),
        "Pod": ("pods", True),
    },
    "apps/v1": {"DaemonSet": ("daemonsets", True)},
    "networking.k8s.io/v1": {"NetworkPolicy": ("networkpolicies", True)},
    "rbac.authorization.k8s.io/v1": {
        "ClusterRole": ("clusterroles", False),
        "ClusterRoleBinding": ("clusterrolebindings", False),
    },
    f"{OPERATOR}/v1": {
        "PodMonitor": ("podmonitors", True),
        "ServiceMonitor": ("servicemonitors", True),
        "PrometheusRule": ("prometheusrules", True),
    },
}
"""API groups as `/api` and `/apis` list them: (plural, namespaced) by kind."""


class Cluster:
    """Serves on loopback. `objects` holds what was applied, by path; `refused` says what was not and why."""

    def __init__(self):
        self.objects = {}
        self.refused = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def kinds(self):
        """The kinds of the objects that are there, sorted."""
        return sorted(manifest["kind"] for manifest in self.objects.values())

    def the(self, kind):
        """The only object of a kind."""
        (found,) = [manifest for manifest in self.objects.values() if manifest["kind"] == kind]
        return found

    def close(self):
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def answer(self, method, path, manifest, form):
        """Status and contents of the answer; `form` is the media type of what was sent."""
        if method == "PATCH" and form == "application/apply-patch+yaml":
            return self._apply(path, manifest)
        if method == "GET" and (found := _discovery(path) or self.objects.get(path)):
            return 200, found
        if method == "DELETE" and self.objects.pop(path, None):
            return 200, {"apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Success"}
        return 404, _failure(404, "NotFound", f"{method} {path}: not found")

    def _apply(self, place, manifest):
        """As the real server does, say no to fields that the kind has not and to namespaces that are not there."""
        namespace = re.search(r"/namespaces/([^/]+)/", place)
        if namespace and f"/api/v1/namespaces/{namespace[1]}" not in self.objects:
            return self._refuse(place, 404, "NotFound", f'namespaces "{namespace[1]}" not found')
        if OPERATOR not in manifest["apiVersion"]:
            try:
                kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
            except kubernetes_validate.ValidationError as error:
                return self._refuse(place, 422, "Invalid", str(error))
        code = 200 if place in self.objects else 201
        self.objects[place] = {
            **manifest,
            "metadata": {**manifest["metadata"], "uid": str(uuid.uuid5(uuid.NAMESPACE_URL, place))},
        }
        return code, self.objects[place]

    def _refuse(self, place, code, reason, message):
        self.refused.append(f"{place}: {message}")
        return code, _failure(code, reason, message)


def _failure(code, reason, message):
    answer = {"apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure"}
    return {**answer, "code": code, "reason": reason, "message": message}


def _root(version):
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _discovery(path):
    """What `/version`, `/api`, `/apis` and `/openapi/v3` and those below them say, None for another path."""
    fixed = {
        "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [_group(one) for one in RESOURCES if "/" in one],
        },
        "/openapi/v3": {
            "paths": {_root(one)[1:]: {"serverRelativeURL": f"/openapi/v3{_root(one)}?hash=1"} for one in RESOURCES}
        },
    }
    for version in RESOURCES:
        fixed[_root(version)] = {"kind": "APIResourceList", "groupVersion": version, "resources": _listed(version)}
        fixed[f"/openapi/v3{_root(version)}"] = {
            "openapi": "3.0.0",
            "info": {"title": "k"},
            "paths": _described(version),
        }
    return fixed.get(path)


def _group(version):
    one = {"groupVersion": version, "version": version.partition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [one], "preferredVersion": one}


def _listed(version):
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    kinds = RESOURCES[version].items()
    return [
        {"name": plural, "singularName": "", "kind": kind, "namespaced": namespaced, "verbs": verbs}
        for kind, (plural, namespaced) in kinds
    ]


def _described(version):
    """That the server itself refuses unknown fields, which is all that clients look for here."""
    group, _, name = version.rpartition("/")
    paths = {}
    for kind, (plural, namespaced) in RESOURCES[version].items():
        place = f"{_root(version)}/{'namespaces/{namespace}/' if namespaced else ''}{plural}/{{name}}"
        checks = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
        patch = {
            "parameters": [checks],
            "responses": {},
            "x-kubernetes-group-version-kind": {"group": group, "version": name, "kind": kind},
        }
        paths[place] = {"patch": patch}
    return paths


def _handler(cluster):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self):
            manifest = yaml.safe_load(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            code, contents = cluster.answer(
                self.command, urlsplit(self.path).path, manifest, self.headers.get("Content-Type", "")
            )
            body = json.dumps(contents).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815 - the base class asks for these names

        def log_message(self, *args):
            """Quiet."""

    return Handler
