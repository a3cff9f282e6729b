"""Logs a run to MLflow: parameters, metrics, quantiles, sample trajectories, alarms and the final state."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from verbatim.core.disk import write_file
from verbatim.core.errors import UsageError
from verbatim.core.imports import refuse_without
from verbatim.core.redaction import without_secrets
from verbatim.logs.monitors.alarm import Alarm
from verbatim.logs.monitors.background import reason, warn
from verbatim.logs.monitors.monitor import Distributions, Metrics, RunInfo
from verbatim.logs.monitors.samples import COLUMNS, SampleRow
from verbatim.logs.monitors.service import ServiceMonitor, ServiceSettings, known_id
from verbatim.logs.monitors.values import flat, quantiles

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

RUN_ID = "mlflow_run_id"
"""File in the run folder with the id of the MLflow run, so that a resumed run continues the same MLflow run."""
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
"""MLflow's status for each final state of a run."""
_BATCH, _PARAMS = 1000, 100
"""Maximum number of metrics, and of parameters, in one request, as limited by MLflow's API."""
_LONGEST_PARAM, _LONGEST_TAG = 6000, 8000
"""Maximum length of a parameter, and of a tag, in characters."""
_MOST_TABLES = 80
"""Maximum number of tables that are listed in the run's tag: the newest tables. A longer list would exceed a tag's
maximum length."""
_TABLES = "mlflow.loggedArtifacts"
"""Name of the tag that MLflow's pages read to find a run's tables."""
_FOREIGN = re.compile(r"[^\w\-. :/]")
"""Matches characters that MLflow does not accept in names."""
_CLIENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}
"""Environment variables for the client, unless already set: no telemetry, and timeouts short enough that the client
gives up on an unresponsive server before the timeouts of `Background`."""


@dataclass(frozen=True, kw_only=True)
class Mlflow(ServiceSettings):
    """[monitor.mlflow]: opens a run in an experiment on an MLflow server or in a database.

    Raises:
        UsageError: mlflow is not installed, or does not support the tracking URI.
    """

    package: ClassVar[str] = "mlflow"
    experiment: str
    """The experiment. It is created if it does not exist."""
    name: str | None = None
    """The name of the MLflow run; by default the name of this run."""
    tracking_uri: str | None = None
    """The server or database, such as `http://host:5000` or `sqlite:///mlflow.db`. By default the value of
    MLFLOW_TRACKING_URI, or else MLflow's own default, the database `mlflow.db` in the working directory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.experiment.strip() or len(self.experiment) > 500:
            raise UsageError(f"[monitor.mlflow] experiment = {self.experiment!r:.80}; expected 1 to 500 characters")
        shown = without_secrets(self.uri)
        scheme = self.uri.partition(":")[0] if ":" in self.uri else "file"
        if scheme == "file" and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("true", "1"):
            raise UsageError(
                f"[monitor.mlflow] tracking_uri = {shown!r}: MLflow no longer writes to folders unless "
                "MLFLOW_ALLOW_FILE_STORE=true is set; give a database, sqlite:///mlflow.db, or a server"
            )
        if not scheme.startswith(("http", "file", "databricks")):
            what = f"[monitor.mlflow] tracking_uri = {shown!r}: a database"
            refuse_without("sqlalchemy", extra="mlflow", what=what)

    @property
    def uri(self) -> str:
        """The tracking URI in effect."""
        return self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"

    def __call__(self, run: RunInfo) -> MlflowMonitor:
        return MlflowMonitor(self, run)


@dataclass(eq=False)
class _Record:
    """An open MLflow run, used by one thread."""

    client: MlflowClient
    run_id: str
    is_new: bool
    """True if this process created the MLflow run; False if it continues an existing run."""
    tables: list[str]
    """Files of the run's tables."""

    def __post_init__(self) -> None:
        self._logged: dict[str, int] = {}

    def log(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        """Log metrics, unless an earlier process of the run logged this step, because MLflow would keep both values.
        The steps that are logged already are read from the history of the first metric, because every report of the
        same kind has this metric."""
        mark = next(iter(metrics))
        if mark not in self._logged:
            history = [] if self.is_new else self.client.get_metric_history(self.run_id, _key(mark))
            self._logged[mark] = max((metric.step for metric in history), default=-1)
        if step <= self._logged[mark]:
            return
        from mlflow.entities import Metric

        found = [Metric(_key(name), float(value), int(at * 1000), step) for name, value in metrics.items()]
        for first in range(0, len(found), _BATCH):
            self.client.log_batch(self.run_id, metrics=found[first : first + _BATCH])


class MlflowMonitor(ServiceMonitor[_Record]):
    """Writes one MLflow run: all metrics, quantiles of each distribution (because MLflow has no histograms), and tables
    of trajectories such as `trajectories/step-000010.json`."""

    service = "MLflow"
    retry_seconds = 60.0
    """Seconds between attempts to reach a server. MLflow has no offline mode, so a single attempt would not be
    enough."""

    def __init__(self, settings: Mlflow, run: RunInfo) -> None:
        self._settings = settings
        super().__init__(settings, run)

    def _log_metrics(
        self, record: _Record, at: float, step: int, prefix: str, metrics: Metrics, distributions: Distributions
    ) -> None:
        spread = {
            f"{name}/{quantile}": value
            for name, values in distributions.items()
            for quantile, value in quantiles(values).items()
        }
        record.log(step, at, {f"{prefix}{name}": value for name, value in metrics.items()} | spread)

    def _log_table(self, record: _Record, at: float, step: int, rows: Sequence[SampleRow]) -> None:
        file = f"trajectories/step-{step:06d}.json"
        record.client.log_dict(record.run_id, {"columns": COLUMNS, "data": [astuple(row) for row in rows]}, file)
        if file not in record.tables:
            record.tables.append(file)
        listed = [{"path": path, "type": "table"} for path in record.tables[-_MOST_TABLES:]]
        record.client.set_tag(record.run_id, _TABLES, json.dumps(listed))

    def _log_alarm(self, record: _Record, at: float, alarm: Alarm) -> None:
        """Log the alarm's metric, its text as a tag, and the file `alarms.jsonl` with all alarms."""
        record.log(alarm.step, at, {alarm.metric: float(alarm.state == "raised")})
        record.client.set_tag(record.run_id, _key(alarm.metric.replace("/", ".")), alarm.text[:_LONGEST_TAG])
        if (file := self._run.folder / "alarms.jsonl").is_file():
            record.client.log_artifact(record.run_id, str(file))

    def _log_end(self, record: _Record, at: float, summary: Mapping[str, Any]) -> None:
        """Log the final results as metrics."""
        results = {f"results/{k}": v for k, v in summary["results"].items() if isinstance(v, int | float)}
        if results:
            record.log(summary["steps"], at, results)

    def _finish(self, record: _Record) -> None:
        record.client.set_terminated(record.run_id, STATUS[self._state])

    def _open(self) -> _Record:
        for name, value in _CLIENT.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient  # imported here, on the thread, because it takes seconds

        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        # Hide urllib3's warnings about each retry on this thread, because `Background` reports the outcome once.
        own = threading.current_thread().name
        logging.getLogger("urllib3.connectionpool").addFilter(lambda record: record.threadName != own)
        client = MlflowClient(tracking_uri=self._settings.uri)
        record = self._found(client) or self._made(client)
        there = client.get_run(record.run_id).data.params if not record.is_new else {}
        config = {_key(name): value for name, value in flat(self._run.config).items() if value is not None}
        new = {name: str(value)[:_LONGEST_PARAM] for name, value in config.items() if name not in there}
        self._log_params(record, new)
        client.log_dict(record.run_id, dict(self._run.config), "config.json")
        logger.info("MLflow: run %s of experiment %s", record.run_id, self._settings.experiment)
        return record

    def _found(self, client: MlflowClient) -> _Record | None:
        """The MLflow run that an earlier process of this run opened, if it still exists."""
        if (run_id := known_id(self._run.folder / RUN_ID)) is None:
            return None
        try:
            run = client.get_run(run_id)
        except Exception as error:
            if getattr(error, "error_code", None) != "RESOURCE_DOES_NOT_EXIST":
                raise
            warn("MLflow", f"the run {run_id} no longer exists; opening a new one: {reason(error)}")
            return None
        client.update_run(run_id, status="RUNNING")
        tables = [table["path"] for table in json.loads(run.data.tags.get(_TABLES, "[]"))]
        return _Record(client, run_id, False, tables)

    def _made(self, client: MlflowClient) -> _Record:
        experiment = client.get_experiment_by_name(self._settings.experiment)
        number = client.create_experiment(self._settings.experiment) if experiment is None else experiment.experiment_id
        run = client.create_run(number, run_name=self._settings.name or self._run.name)
        write_file(self._run.folder / RUN_ID, run.info.run_id.encode())
        return _Record(client, run.info.run_id, True, [])

    @staticmethod
    def _log_params(record: _Record, params: Mapping[str, str]) -> None:
        """Log new parameters. MLflow does not allow parameters to change, so after a resume only config.json has the
        current values."""
        from mlflow.entities import Param

        found = [Param(name, value) for name, value in params.items()]
        for first in range(0, len(found), _PARAMS):
            record.client.log_batch(record.run_id, params=found[first : first + _PARAMS])


def _key(name: str) -> str:
    """Convert a name to a name that MLflow accepts, with letters, digits and `_-. :/` only.

    >>> _key("errors/tool (late)")
    'errors/tool _late_'
    """
    return _FOREIGN.sub("_", name)[:250]  # MLflow's maximum length
