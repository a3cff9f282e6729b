"""An agent program without any SDK: plays what its example says. Knows nothing of Verbatim."""

import json
import os
import subprocess
import sys
import time
import urllib.request


def post(url, key, body):
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json", "authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def ask(base_url, key, messages):
    return post(f"{base_url}/chat/completions", key, {"model": "any", "messages": messages})["choices"][0]["message"]


def play(example, base_url, key):
    messages = []
    for text in example["texts"]:
        messages.append({"role": "user", "content": text})
        said = ask(base_url, key, messages)
        messages.append({"role": "assistant", "content": said["content"]} if "bare" in example else said)
    return len(messages[-1]["content"])


def one(example):
    how = example.get("how", "")
    if how == "silent":
        print(0.5)
        return
    if how == "crash":
        sys.exit("it broke")
    base_url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    reward = play(example, base_url, key)
    if how == "hang":
        print("waiting", flush=True)
        time.sleep(1000)
    elif how == "late":
        os._exit(3)
    elif how == "kill":
        os.kill(os.getpid(), 9)
    elif how == "post":
        post(os.environ["VERBATIM_REWARD_URL"], key, {"reward": 7})
    elif how == "file":
        with open(os.path.join(os.environ["VERBATIM_WORK_DIR"], "reward.txt"), "w") as file:
            file.write(f"{reward / 2}\n")
    elif how == "noisy":
        for _ in range(3000):
            print("x" * 1000)
            print("y" * 1000, file=sys.stderr)
        print(json.dumps({"reward": {"length": reward}}))
    elif how == "look":
        try:
            urllib.request.urlopen("http://127.0.0.1:" + example["port"], timeout=2)
            print(1)
        except OSError:
            print(0)
    elif how == "leaves":
        subprocess.Popen(["sleep", "8"], start_new_session=True)
        print(reward)
    elif how == "no reward":
        print("done")
    else:
        print("a log line\n" + json.dumps({"reward": reward}) + "\n")


def lines():
    for line in sys.stdin:
        order = json.loads(line)
        example = order["example"]
        print("working on", order["id"], flush=True)
        if example.get("how") == "crash":
            sys.exit("it broke")
        if example.get("how") == "hang":
            time.sleep(1000)
        if example.get("how") == "error":
            print(json.dumps({"id": order["id"], "error": "no luck"}), flush=True)
            continue
        reward = play(example, order["base_url"], order["api_key"])
        print(json.dumps({"id": order["id"], "reward": reward, "pid": os.getpid()}), flush=True)


if __name__ == "__main__":
    if "--lines" in sys.argv:
        lines()
    elif len(sys.argv) > 1:
        with open(sys.argv[1]) as file:
            one(json.load(file))
    else:
        one(json.loads(sys.stdin.readline()))
