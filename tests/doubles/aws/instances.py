"""The clusters and their container instances, as documented.

State, attributes, and the operations on them.

Sources: the operations' pages and Attribute in docs.aws.amazon.com/AmazonECS/latest/APIReference.
"""

from __future__ import annotations

import re
import string
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.doubles.aws.clockwork import Clockwork
from tests.doubles.aws.expressions import parse
from tests.doubles.aws.values import AwsRefusal, Changed, Cluster, ContainerInstance, invalid

_MAX_ATTRIBUTES = 10
_ATTRIBUTE_NAME = re.compile(r"[A-Za-z0-9_/\\.-]{1,128}")
_ATTRIBUTE_VALUE = re.compile(r"(?! )[A-Za-z0-9_.@/\\: -]{1,128}(?<! )")
Request = Mapping[str, Any]


@dataclass
class ContainerInstances:
    clockwork: Clockwork
    changed: Changed
    lock: threading.RLock
    clusters: dict[str, Cluster] = field(default_factory=dict)

    def cluster_of(self, request: Request) -> Cluster:
        name = str(request.get("cluster") or "default").rsplit("/", 1)[-1]
        if name not in self.clusters:
            raise AwsRefusal("ClusterNotFoundException", "Cluster not found.")
        return self.clusters[name]

    def create_cluster(self, request: Request) -> dict[str, Any]:
        name = request.get("clusterName") or "default"
        cluster = self.clusters.setdefault(name, Cluster(name))
        return {"cluster": _told_cluster(cluster)}

    def describe_clusters(self, request: Request) -> dict[str, Any]:
        names = [str(name).rsplit("/", 1)[-1] for name in request.get("clusters") or ["default"]]
        known = [_told_cluster(self.clusters[name]) for name in names if name in self.clusters]
        unknown = [
            {"arn": Cluster(name).arn, "reason": "MISSING"}
            for name in names
            if name not in self.clusters
        ]
        return {"clusters": known, "failures": unknown}

    def instance_of(self, cluster: Cluster, name: str) -> ContainerInstance | None:
        return cluster.instances.get(str(name).rsplit("/", 1)[-1])

    def list_container_instances(self, request: Request) -> dict[str, Any]:
        cluster = self.cluster_of(request)
        status = request.get("status")
        test = parse(request["filter"]) if request.get("filter") else None
        found = [
            one.arn
            for one in cluster.instances.values()
            if (one.status == status or (status is None and one.status != "INACTIVE"))
            and (test is None or test(one))
        ]
        return page("containerInstanceArns", found, request)

    def describe_container_instances(self, request: Request) -> dict[str, Any]:
        names = request.get("containerInstances", [])
        if not names:
            raise invalid("Container instance cannot be empty.")
        if len(names) > 100:
            raise invalid("Container instances cannot have more than 100 elements.")
        if "" in names:  # as https://github.com/nextflow-io/nextflow/issues/1658 shows it
            raise invalid("Container instance can not be blank.")
        health = "CONTAINER_INSTANCE_HEALTH" in request.get("include", [])
        return self._of_instances(request, names, lambda one: one.describe(health))

    def update_container_instances_state(self, request: Request) -> dict[str, Any]:
        names = request["containerInstances"]
        if not 1 <= len(names) <= 10:
            raise invalid("Container instances must have between 1 and 10 elements.")
        if request["status"] not in ("ACTIVE", "DRAINING"):
            raise invalid(
                f"Container instance status {request['status']} is not one of ACTIVE, DRAINING."
            )

        def update(instance: ContainerInstance) -> dict[str, Any]:
            if instance.status != request["status"]:
                instance.status = request["status"]
                instance.version += 1
                self.changed(instance)
            return instance.describe()

        return self._of_instances(request, names, update)

    def _of_instances(self, request: Request, names: list[str], tell: Any) -> dict[str, Any]:
        cluster = self.cluster_of(request)
        found = {name: self.instance_of(cluster, name) for name in names}
        missing = [
            {
                "arn": cluster.arn.replace(":cluster/", ":container-instance/")
                + f"/{name.rsplit('/', 1)[-1]}",
                "reason": "MISSING",
            }
            for name, one in found.items()
            if one is None
        ]
        return {
            "containerInstances": [tell(one) for one in found.values() if one],
            "failures": missing,
        }

    def put_attributes(self, request: Request) -> dict[str, Any]:
        wanted = self._attributes(request)
        for one, instance in wanted:
            name, value = one["name"], one.get("value")
            if not _ATTRIBUTE_NAME.fullmatch(name):
                raise invalid(f"Attribute name {name!r} is invalid.")
            if value is not None and not _ATTRIBUTE_VALUE.fullmatch(value):
                raise invalid(f"Attribute value {value!r} is invalid.")
            names = set(instance.attributes) | {put["name"] for put, of in wanted if of is instance}
            if len(names) > _MAX_ATTRIBUTES:
                raise AwsRefusal(
                    "AttributeLimitExceededException",
                    "You can apply up to 10 custom attributes for each resource.",
                )
        for one, instance in wanted:
            instance.attributes[one["name"]] = one.get("value")
            instance.version += 1
            self.changed(instance)
        return {"attributes": [dict(one) for one, _ in wanted]}

    def delete_attributes(self, request: Request) -> dict[str, Any]:
        wanted = self._attributes(request)
        for one, instance in wanted:
            instance.attributes.pop(one["name"], None)
            instance.version += 1
            self.changed(instance)
        return {"attributes": [dict(one) for one, _ in wanted]}

    def _attributes(self, request: Request) -> list[tuple[Request, ContainerInstance]]:
        cluster = self.cluster_of(request)
        wanted = []
        given = request["attributes"]
        if not 1 <= len(given) <= 10:
            raise invalid("You can specify up to 10 attributes in a single call.")
        for one in given:
            target = str(one.get("targetId", ""))
            if not target.startswith("arn:") and one.get("targetType") != "container-instance":
                raise invalid("targetType is required with the short form of targetId.")
            instance = self.instance_of(cluster, target)
            if instance is None or instance.status == "INACTIVE":
                raise AwsRefusal("TargetNotFoundException", "The specified target wasn't found.")
            wanted.append((one, instance))
        return wanted

    def list_attributes(self, request: Request) -> dict[str, Any]:
        cluster = self.cluster_of(request)
        rows = [
            {"name": name, "targetType": "container-instance", "targetId": instance.arn}
            | ({"value": value} if value is not None else {})
            for instance in cluster.instances.values()
            for name, value in sorted(instance.attributes.items())
            if request.get("attributeName", name) == name
            and request.get("attributeValue", value) == value
        ]
        return page("attributes", rows, request)


def _told_cluster(cluster: Cluster) -> dict[str, Any]:
    active = [one for one in cluster.instances.values() if one.status != "INACTIVE"]
    tasks = [task.last_status for task in cluster.tasks.values()]
    return {
        "clusterArn": cluster.arn,
        "clusterName": cluster.name,
        "status": "ACTIVE",
        "registeredContainerInstancesCount": len(active),
        "runningTasksCount": tasks.count("RUNNING"),
        "pendingTasksCount": tasks.count("PENDING"),
    }


def page(key: str, rows: list[Any], request: Request) -> dict[str, Any]:
    size = request.get("maxResults", 100)
    if not 1 <= size <= 100:
        raise invalid("maxResults must be between 1 and 100.")
    start = request.get("nextToken", "0")
    if start.strip(string.digits):
        raise invalid("Invalid token.")
    rest = {"nextToken": str(int(start) + size)} if int(start) + size < len(rows) else {}
    return {key: rows[int(start) : int(start) + size]} | rest
