# Worker and command line in one image. The agent is built by the worker itself, and runs on the nodes only.
FROM python:3.12-slim-bookworm

# The time of the commit, from those who want an image that they can compare (docs/compose.md): pip, compileall and useradd take it
# instead of the clock.
ARG SOURCE_DATE_EPOCH

# A user that WORKER_UID gives another number has no name in this image: USER and HOME are then all that says who it is and where its ~/.ssh is.
ENV USER=relaunch HOME=/home/relaunch PYTHONUNBUFFERED=1
# The state folder is open because a new volume takes its owner and mode from here, and WORKER_UID is known only later.
RUN useradd --uid 1000 --create-home relaunch && install -d -m 1777 /var/lib/relaunch
WORKDIR /app

# What it runs with, in the versions that the tests ran with, and only as PyPI had it when they were locked (`make lock`).
# Without the server that `up` starts, which has a separate image.
# deploy/compose/requirements.lock has nothing that only tests need.
COPY deploy/compose/requirements.lock /tmp/
RUN pip install --no-cache-dir --root-user-action=ignore --require-hashes --only-binary :all: --requirement /tmp/requirements.lock

COPY pyproject.toml README.md LICENSE THIRD_PARTY_NOTICES.md *.py ./
COPY activities activities
COPY deploy/compose/*.py deploy/compose/
COPY relaunch relaunch
COPY workflows workflows
# Its version is what a worker tells the server as its build; `relaunch` is for `docker compose exec`.
RUN pip install --no-cache-dir --root-user-action=ignore --no-deps --no-build-isolation --editable . && python -m compileall -q .

USER relaunch
ENV RELAUNCH_STATE=/var/lib/relaunch
HEALTHCHECK --interval=60s --timeout=20s --retries=2 --start-period=60s CMD ["python", "-m", "deploy.compose.polling"]
CMD ["python", "worker.py"]
