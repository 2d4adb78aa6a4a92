"""`quotient what-if`: whether pods would be admitted and where they would run, or what is missing."""

import functools
import operator
from collections.abc import Sequence
from itertools import compress, groupby
from typing import Any

import click
import msgspec
from rich.markup import escape

from cluster.objects import Pod
from console.errors import CommandError
from console.manifests import Document, decode_document, mapping_at, pods_of, read_objects
from console.offline_admission import OfflineQuotas, admit_offline
from console.printing import count_of, show_warnings, wide_console
from console.quotas_in_force import QuotasInForce
from settings.configuration import Configuration
from settings.loading import Loaded
from vcuda.decision import Reason
from vcuda.host import host_requests
from vcuda.limits import admitted_options
from vcuda.quota import ALLOW, Quota
from vcuda.request import request_held_by
from vcuda.trial_cluster import TrialCluster, TrialPod
from vcuda.what_if import MAX_REPLICAS, Answer, try_replicas
from webhook.service import admission_config_of

MAX_NODES_SHOWN = 8
DAEMON_SET_NOTE = "a DaemonSet has a pod on each node on which it fits: this is the answer for one of them"


class Question(msgspec.Struct, frozen=True):
    """A pod or workload of a file, and how many replicas of it are asked about; `pod` as the webhook would leave it."""

    title: str
    namespace: str
    replicas: int
    pod: Document
    # Why it would be refused whatever is used of the quotas.
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()


@click.command("what-if", short_help="Tell whether and where pods would run, or what is missing.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-n", "--namespace", default="default", show_default=True, help="For documents that name none.")
@click.option("--replicas", type=click.IntRange(1, MAX_REPLICAS), help="Instead of those that the file says.")
@click.option(
    "--cluster",
    "dumps",
    multiple=True,
    metavar="FILE",
    help="A dump of nodes, pods and quotas (kubectl get ... -o yaml) instead of the live cluster.",
)
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def what_if(
    context: click.Context,
    files: tuple[str, ...],
    *,
    namespace: str,
    replicas: int | None,
    dumps: tuple[str, ...],
    output: str,
) -> None:
    """Tell whether pods would be admitted and where they would run now, or what is missing. Changes nothing.

    FILE is a manifest of pods or workloads, or - for standard input; its documents are tried one after another, each
    beside those before it; those that request no GPUs are left out. Quotas, GPUs, CPU and memory count, and whether
    nodes take pods; nodeSelector, taints, affinity and volumes do not. -o json writes one object per document and
    line. Exit code: 0 all would run, 1 some would not, 2 wrong usage, an invalid file or no cluster.
    """
    from console.cluster_snapshot import read_snapshot  # noqa: PLC0415 - other commands start without the API client

    loaded: Loaded = context.obj
    documents = read_asked(files, namespace, replicas)
    snapshot = read_snapshot(loaded.configuration, dumps)
    show_warnings(snapshot.quotas.warnings)
    questions = questions_of(documents, snapshot.quotas, loaded.configuration)
    trial = snapshot.trial({question.namespace for question in questions})
    answers = [(question, answer_of(question, trial, loaded.configuration)) for question in questions]
    for question, answer in answers:
        if output == "json":
            click.echo(msgspec.json.encode(answer_json(question, answer)))
        else:
            show_answer(question, answer)
    context.exit(0 if all(answer.is_possible for _, answer in answers) else 1)


def read_asked(files: Sequence[str], namespace: str, replicas: int | None) -> list[Question]:
    """Return the pods and workloads of files as they are written; raises CommandError if there is none."""
    asked = []
    for _, document in read_objects(files):
        pods = list(pods_of(document, MAX_REPLICAS + 1))
        if not pods:
            continue
        title, pod = pods[0]
        if replicas is None and len(pods) > MAX_REPLICAS:
            raise CommandError(f"{title}: more than {MAX_REPLICAS} replicas; ask about fewer with --replicas")
        where = str(mapping_at(pod, "metadata").get("namespace") or namespace)
        count = replicas or (1 if title.startswith("Pod/") else len(pods))
        notes = (DAEMON_SET_NOTE,) if title.startswith("DaemonSet/") else ()
        asked.append(Question(title, where, count, pod, notes=notes))
    if not asked:
        raise CommandError(f"{', '.join(files)}: no pod or workload in it that would have a replica")
    return asked


def questions_of(asked: Sequence[Question], quotas: QuotasInForce, configuration: Configuration) -> list[Question]:
    """Return the questions about pods with GPUs, as the webhook would leave them; the others are only noted."""
    admitted = [admitted_question(each, quotas.of(each.namespace), configuration) for each in asked]
    is_asked = [each.reasons or trial_pod(each, configuration).request.containers for each in admitted]
    if not any(is_asked):
        raise CommandError(f"{admitted[0].title}: requests no GPUs, so Quotient neither admits nor places it")
    for each in compress(admitted, map(operator.not_, is_asked)):
        click.echo(f"note: {each.title}: requests no GPUs, and is left out", err=True)
    return list(compress(admitted, is_asked))


def admitted_question(question: Question, quotas: Sequence[Quota], configuration: Configuration) -> Question:
    # Without the limits of the quotas: those are tried afterwards, with what is used of them.
    unlimited = [Quota(each.name, {}, unlisted=ALLOW, policy=each.policy) for each in quotas]
    offline = OfflineQuotas({question.namespace: unlimited})
    result = admit_offline(question.pod, admission_config_of(configuration), offline, question.namespace)
    notes = (*question.notes, *result.warnings)
    return msgspec.structs.replace(question, pod=result.object, reasons=result.reasons, notes=notes)


def answer_of(question: Question, trial: TrialCluster, configuration: Configuration) -> Answer:
    if question.reasons:
        message = "; ".join(reason.problem for reason in question.reasons)
        return Answer(question.replicas, 0, message=message, reasons=question.reasons)
    return try_replicas(trial, trial_pod(question, configuration), question.replicas)


def notes_on(question: Question, answer: Answer) -> list[str]:
    audited = [f"audit mode: the quota would refuse it: {reason.problem}" for reason in answer.audited]
    return [*question.notes, *audited]


def trial_pod(question: Question, configuration: Configuration) -> TrialPod:
    scheme = admission_config_of(configuration).scheme
    spec = decode_document(question.pod, Pod).spec
    annotations = {str(key): str(value) for key, value in annotations_of(question.pod).items()}
    return TrialPod(
        request_held_by(spec, annotations, scheme),
        question.namespace,
        admitted_options(annotations, scheme),
        host_requests(spec),
    )


def annotations_of(pod: Document) -> dict[str, Any]:
    return mapping_at(mapping_at(pod, "metadata"), "annotations")


def answer_json(question: Question, answer: Answer) -> dict[str, Any]:
    return {
        "object": question.title,
        "namespace": question.namespace,
        "possible": answer.is_possible,
        **msgspec.to_builtins(answer),
        **({"notes": notes} if (notes := notes_on(question, answer)) else {}),
    }


def show_answer(question: Question, answer: Answer) -> None:
    line = functools.partial(wide_console().print, highlight=False, soft_wrap=True)
    title = escape(f"{question.title} in namespace {question.namespace}")
    replicas = "" if answer.replicas == 1 else f" ({answer.replicas} replicas)"
    if answer.is_possible:
        line(f"{title}{replicas}: [green]would run[/green]")
    elif answer.admitted == 0:
        line(f"{title}{replicas}: [bold red]would be refused[/bold red]")
    else:
        running = f"{len(answer.placed)} of {answer.replicas} would run" if answer.placed else "would wait"
        line(f"{title}{replicas}: [yellow]{running}[/yellow], {answer.admitted} would be admitted")
    nodes = [(node, len(list(group))) for node, group in groupby(sorted(each.node for each in answer.placed))]
    for node, count in nodes[:MAX_NODES_SHOWN]:
        line(f"  on {escape(node)}: {count_of(count, 'replica')}, {escape(gpus_on(node, answer))}")
    if len(nodes) > MAX_NODES_SHOWN:
        line(f"  and on {count_of(len(nodes) - MAX_NODES_SHOWN, 'other node')}")
    if answer.missing is not None:
        line(f"  missing: [bold]{answer.missing}[/bold]: {escape(answer.message)}")
    for reason in answer.reasons:
        if answer.missing is None:
            line(f"  [red]{escape(reason.field)}[/red]: {escape(reason.message)}")
        line(f"    [bold]{escape(reason.remedy)}[/bold]")
    for note in notes_on(question, answer):
        line(f"  [yellow]note[/yellow] {escape(note)}")


def gpus_on(node: str, answer: Answer) -> str:
    """Return the GPUs that replicas would have on a node."""
    used: dict[str, int] = {}
    for replica in answer.placed:
        if replica.node == node:
            for each in (each for slices in replica.gpus.values() for each in slices):
                used[each.uuid] = used.get(each.uuid, 0) + each.cores
    return ", ".join(f"{uuid} ({cores} cores)" for uuid, cores in used.items())
