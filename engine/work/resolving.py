"""The resolver that [delivery] describes: its name servers, and the policies of MTA-STS that earlier runs have seen."""

from __future__ import annotations

import random
import ssl
from pathlib import Path

from engine.clock import Clock
from engine.config import DeliveryTable
from engine.route.dns_client import DnsClient, NameServer, system_servers
from engine.route.mta_sts import HttpsFetcher, PolicyCache
from engine.route.provider import load_providers
from engine.route.resolver import Resolver

POLICIES_FILE = "mta-sts.jsonl"  # in the campaign's run folder, shared by its workers


def make_resolver(delivery: DeliveryTable, clock: Clock, rng: random.Random, run: Path) -> Resolver:
    """A resolver for one worker; `run` is the folder in which policies outlive it."""
    servers = [name_server(text) for text in delivery.nameservers] or system_servers()
    own = [delivery.greeting_name] if delivery.greeting_name else []
    client = DnsClient(servers)
    resolver = Resolver(
        client, load_providers(), clock, own_names=own, allow_private=delivery.allow_private_hosts, rng=rng
    )
    if delivery.mta_sts:
        context = ssl.create_default_context()
        if delivery.tls_ca_file is not None:
            context.load_verify_locations(delivery.tls_ca_file)  # beside the public ones, which sign most policies
        fetcher = HttpsFetcher(client, port=delivery.mta_sts_port, context=context, is_usable=resolver.is_usable)
        resolver.policies = PolicyCache(client, fetcher, clock, run / POLICIES_FILE)
    return resolver


def name_server(text: str) -> NameServer:
    """A name server as settings write it: ADDRESS or ADDRESS:PORT, an IPv6 address with a port in brackets."""
    if text.startswith("["):
        address, _, port = text[1:].partition("]")
        return NameServer(address, int(port.lstrip(":") or 53))
    if text.count(":") == 1:
        address, _, port = text.partition(":")
        return NameServer(address, int(port))
    return NameServer(text)
