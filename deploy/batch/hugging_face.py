"""Schedules one night on Hugging Face's machines: run it once, with a token that may start jobs there.

    python hugging_face.py --namespace my-org --image my-registry/eagle-quarry:0.1.0 --input my-org/nightly

It prints the id of the scheduled job; `hf jobs scheduled trigger ID` begins a night now.
The image of ../../Dockerfile must be in a public registry. The dataset repository --input holds nightly.yaml.
The machine keeps nothing: the job must name a repository under `hub`, and a night that fails is begun anew.
"""

import argparse
import os

from huggingface_hub import Volume, create_scheduled_job


def schedule(namespace: str, image: str, source: str, token: str) -> str:
    """Make the scheduled job and return its id; QUARRY_HUB_TOKEN pushes, HF_TOKEN downloads."""
    made = create_scheduled_job(
        image=image,
        command=["quarry", "extract", "/input/nightly.yaml", "--out", "/var/lib/quarry/night"],
        schedule="0 3 * * *",
        concurrency=False,
        attempts=3,
        flavor="h200",
        timeout="8h",
        secrets={"QUARRY_HUB_TOKEN": token, "HF_TOKEN": token},
        volumes=[Volume(type="dataset", source=source, mount_path="/input", read_only=True)],
        name="quarry-nightly",
        namespace=namespace,
    )
    return made.id


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Schedule one night on Hugging Face's machines.")
    for option in ("--namespace", "--image", "--input"):
        parser.add_argument(option, required=True)
    given = parser.parse_args()
    print(schedule(given.namespace, given.image, given.input, os.environ["HF_TOKEN"]))
