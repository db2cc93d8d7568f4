"""What a person does with the `openai` client: make a video, look at it, drop another, watch a picture come.

Usage: python ask_video.py URL MAJOR; writes video.mp4 and thumbnail.webp, and to report.json what it was told.
"""

import base64
import json
import sys
from pathlib import Path

import openai

url, major = sys.argv[1:]
assert openai.__version__.split(".")[0] == major, openai.__version__
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
prompt = "a red circle on white"

video = client.videos.create_and_poll(
    prompt=prompt, seconds="2", size="128x128", poll_interval_ms=100, extra_body={"seed": 5, "num_inference_steps": 10}
)
client.videos.download_content(video.id).write_to_file("video.mp4")
Path("thumbnail.webp").write_bytes(client.videos.download_content(video.id, variant="thumbnail").read())

long = client.videos.create(prompt=prompt, extra_body={"num_inference_steps": 100})
while (running := client.videos.retrieve(long.id)).progress < 5 and running.status in ("queued", "in_progress"):
    pass
listed = [one.id for one in client.videos.list(limit=1)][:2]
deleted = client.videos.delete(long.id).deleted
try:
    client.videos.retrieve(long.id)
    gone = False
except openai.NotFoundError:
    gone = True

stream = client.images.generate(
    prompt=prompt, stream=True, partial_images=2, extra_body={"seed": 5, "num_inference_steps": 50}
)
events = [(event.type, len(base64.b64decode(event.b64_json))) for event in stream]

report = {
    "video": video.model_dump(mode="json"),
    "running": running.status,
    "listed": listed == [long.id, video.id],
    "deleted": deleted,
    "gone": gone,
    "events": events,
}
Path("report.json").write_text(json.dumps(report))
