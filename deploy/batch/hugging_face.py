"""Schedules one night on Hugging Face's machines: run it once, with a token that may start jobs there.

    python hugging_face.py --namespace my-org --image my-registry/eagle-quarry:0.2.0 --input my-org/nightly

With `--parts 16` it schedules sixteen jobs, each for a part of the rows.
It prints the id of each scheduled job; `hf jobs scheduled trigger ID` begins a night now.
The image of ../../Dockerfile must be in a public registry. The dataset repository --input holds nightly.yaml.
The machine keeps nothing: the job must name a repository under `hub`, and a night that fails is begun anew.
"""

import argparse
import os

from huggingface_hub import Volume, create_scheduled_job


def schedule(namespace: str, image: str, source: str, token: str, part: str | None) -> str:
    """Make a scheduled job and return its id; QUARRY_HUB_TOKEN pushes, HF_TOKEN downloads."""
    command = ["quarry", "extract", "/input/nightly.yaml", "--out", "/var/lib/quarry/night"]
    made = create_scheduled_job(
        image=image,
        command=command if part is None else [*command, "--part", part],
        schedule="0 3 * * *",
        concurrency=False,
        attempts=3,
        flavor="h200",
        timeout="8h",
        secrets={"QUARRY_HUB_TOKEN": token, "HF_TOKEN": token},
        volumes=[Volume(type="dataset", source=source, mount_path="/input", read_only=True)],
        name="quarry-nightly" if part is None else f"quarry-nightly-{part.replace('/', '-of-')}",
        namespace=namespace,
    )
    return made.id


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Schedule one night on Hugging Face's machines.")
    for option in ("--namespace", "--image", "--input"):
        parser.add_argument(option, required=True)
    parser.add_argument("--parts", type=int, default=1)
    given = parser.parse_args()
    parts = [f"{number}/{given.parts}" for number in range(1, given.parts + 1)] if given.parts > 1 else [None]
    for part in parts:
        print(schedule(given.namespace, given.image, given.input, os.environ["HF_TOKEN"], part))
