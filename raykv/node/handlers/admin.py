"""Requests about namespaces, recorded traces, and the trails of requests."""

import threading
from typing import Final

from raykv.errors import TransientError, UsageError
from raykv.eviction import policy
from raykv.membership.membership import MembershipPort
from raykv.node.namespace_reconciler import NamespaceReconciler
from raykv.node.request_trails import RequestTrails
from raykv.node.sessions import HandlerTable, NodeSession
from raykv.protocol import codec, messages
from raykv.protocol.namespace import Namespace
from raykv.protocol.trace_requests import TracedRequest
from raykv.storage.store import Store, require_allowed
from raykv.transport.base import Reply

REQUEST_NBYTES: Final = 32
"""Largest encoded size of one recorded request in bytes, without the request's keys."""
MAX_TRACE_NBYTES: Final = 16 << 20
"""Between two fetches, a node collects at most this many bytes of recorded requests, because all must fit into one
message. The node drops further requests."""


class AdminHandler:
    """Opens and configures namespaces, counts what clients report, records requests for a trace, keeps trails."""

    def __init__(
        self, store: Store, lock: threading.Lock, reconciler: NamespaceReconciler, membership: MembershipPort
    ) -> None:
        self._store, self._lock, self._reconciler, self._membership = store, lock, reconciler, membership
        self._trace: list[TracedRequest] = []
        self._trace_nbytes = 0
        self._trails = RequestTrails()
        self.table: HandlerTable = {
            messages.OpenNamespace: self._open_namespace,
            messages.Configure: self._configure,
            messages.Adopt: self._adopt,
            messages.Report: self._report,
            messages.RecordTrace: self._record_trace,
            messages.FetchTrace: self._fetch_trace,
            messages.AddToTrail: self._add_to_trail,
            messages.GetTrail: self._get_trail,
        }

    def _open_namespace(self, request: messages.OpenNamespace, session: NodeSession) -> Reply:
        namespace = Namespace.load(codec.fields(request.namespace))
        session.add_opened(namespace.group.digest)
        with self._lock:
            self._store.groups.open(namespace)
        return Reply(messages.Done())

    def _configure(self, request: messages.Configure, session: NodeSession) -> Reply:
        fields = {} if request.fields is None else codec.fields(request.fields)
        if isinstance(fields.get("policy"), str):
            require_allowed(fields["policy"], self._store.config)
            policy(fields["policy"])  # raises ConfigError if this node lacks the policy; the directory checks the rest
        request.registry = self._reconciler.registry.encode()
        try:
            registry = self._membership.configure(request)
        except TransientError as error:
            return Reply(messages.Unavailable(str(error)))
        self._reconciler.adopt(registry)
        return Reply(messages.Configured(registry))

    def _adopt(self, request: messages.Adopt, session: NodeSession) -> Reply:
        self._reconciler.adopt(request.registry)
        return Reply(messages.Count(self._reconciler.dropped_chunks(request.group)))

    def _report(self, request: messages.Report, session: NodeSession) -> Reply:
        self._reconciler.add_report(request.group, request.misses, request.gets, request.puts)
        return Reply(messages.Done())

    def _record_trace(self, request: messages.RecordTrace, session: NodeSession) -> Reply:
        nbytes = sum(REQUEST_NBYTES + len(each.keys) for each in request.requests)
        with self._lock:
            if self._store.table.header["recording"] and self._trace_nbytes + nbytes <= MAX_TRACE_NBYTES:
                self._trace += request.requests
                self._trace_nbytes += nbytes
        return Reply(messages.Done())

    def _fetch_trace(self, request: messages.FetchTrace, session: NodeSession) -> Reply:
        if not session.local:
            raise UsageError("only processes of this host and user may fetch recorded requests")
        with self._lock:
            self._store.table.header["recording"] = request.on
            trace, self._trace, self._trace_nbytes = self._trace, [], 0
        return Reply(messages.Trace(trace))

    def _add_to_trail(self, request: messages.AddToTrail, session: NodeSession) -> Reply:
        self._trails.add(request.entries)
        return Reply(messages.Done())

    def _get_trail(self, request: messages.GetTrail, session: NodeSession) -> Reply:
        return Reply(messages.Trail(self._trails.find(request.request_id)))
