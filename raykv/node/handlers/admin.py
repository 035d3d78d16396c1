"""Requests about namespaces and recorded traces."""

import threading

import msgspec

from raykv.errors import TransientError, UsageError
from raykv.membership.membership import MembershipPort
from raykv.node.namespace_reconciler import NamespaceReconciler
from raykv.node.sessions import HandlerTable, NodeSession
from raykv.node.trace_buffer import TraceBuffer
from raykv.protocol import codec, messages
from raykv.protocol.namespace import Namespace
from raykv.protocol.trace_requests import FETCHED_KEYS, pack
from raykv.storage.store import Store
from raykv.transport.base import Reply


class AdminHandler:
    """Opens, configures and lists namespaces. Accepts reports of clients, and returns recorded requests."""

    def __init__(
        self,
        store: Store,
        lock: threading.Lock,
        reconciler: NamespaceReconciler,
        membership: MembershipPort,
        trace_buffer: TraceBuffer,
    ) -> None:
        self._store, self._lock, self._reconciler = store, lock, reconciler
        self._membership, self._trace_buffer = membership, trace_buffer
        self.table: HandlerTable = {
            messages.OpenNamespace: self._open_namespace,
            messages.Configure: self._configure,
            messages.Adopt: self._adopt,
            messages.Report: self._report,
            messages.GetNamespaces: self._get_namespaces,
            messages.RecordTrace: self._record_trace,
            messages.FetchTrace: self._fetch_trace,
        }

    def _open_namespace(self, request: messages.OpenNamespace, session: NodeSession) -> Reply:
        namespace = Namespace.load(codec.fields(request.namespace))
        with self._lock:
            self._store.groups.open(namespace, request.capacity_nbytes)
        return Reply(messages.Done())

    def _configure(self, request: messages.Configure, session: NodeSession) -> Reply:
        namespace, fields = Namespace.load(codec.fields(request.namespace)), codec.fields(request.fields)
        if not request.drop:
            self._reconciler.require(namespace, fields)
        try:
            ours = self._reconciler.registry.encode()
            registry = self._membership.configure(namespace, None if request.drop else fields, ours)
        except TransientError as error:
            return Reply(messages.Configured(problem=str(error)))
        self._reconciler.adopt(registry)
        return Reply(messages.Configured(registry, self._reconciler.dropped_chunks(namespace.group.digest)))

    def _adopt(self, request: messages.Adopt, session: NodeSession) -> Reply:
        self._reconciler.adopt(request.registry)
        return Reply(messages.Count(self._reconciler.dropped_chunks(request.group)))

    def _report(self, request: messages.Report, session: NodeSession) -> Reply:
        self._reconciler.add_report(request.group, request.misses, request.gets, request.puts)
        return Reply(messages.Done())

    def _get_namespaces(self, request: messages.GetNamespaces, session: NodeSession) -> Reply:
        return Reply(messages.NamespacesAre(msgspec.json.encode(self._reconciler.list())))

    def _record_trace(self, request: messages.RecordTrace, session: NodeSession) -> Reply:
        if self._store.table.recording:
            self._trace_buffer.add(request.requests)
        return Reply(messages.Done())

    def _fetch_trace(self, request: messages.FetchTrace, session: NodeSession) -> Reply:
        if not session.local:
            raise UsageError("only processes of this host and user may fetch recorded requests")
        self._store.table.recording = request.on
        requests, left_out = self._trace_buffer.drain(FETCHED_KEYS)
        return Reply(messages.Trace(pack(requests), left_out, bool(self._trace_buffer)))
