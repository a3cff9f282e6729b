"""An agent program without any SDK: plays what its example says. Knows nothing of Verbatim."""

import json
import os
import re
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
    if how == "share":
        for _ in range(3):
            if os.fork() == 0:
                held = bytes([1]) * (40 << 20)
                time.sleep(1_000_000 + len(held))
        os.wait()
    if how == "tell":
        sys.exit(f"my key is {os.environ['SEARCH_KEY']}.")
    if how == "crash":
        sys.exit("it broke")
    base_url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    reward = play(example, base_url, key)
    if how == "hang":
        print("waiting", flush=True)
        time.sleep(10**6)
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
            urllib.request.urlopen("http://127.0.0.1:" + example["port"], timeout=300)
            print(1)
        except OSError:
            print(0)
    elif how == "leaves":
        subprocess.Popen(["sleep", "1000000"], start_new_session=True)
        print(reward)
    elif how == "daemon":
        daemon()
        print(reward)
    elif how == "plants":
        import site

        os.makedirs(site.getusersitepackages())
        with open(os.path.join(site.getusersitepackages(), "planted.pth"), "w") as file:
            file.write("import os; print(1000000, flush=True); os._exit(0)\n")
        print(reward)
    elif how == "forges":
        forge()
        print(reward)
    elif how == "no reward":
        print("done")
    else:
        print("a log line\n" + json.dumps({"reward": reward}) + "\n")


def daemon():
    """Leaves a process behind that belongs to no one: `asks.py --sleep`. Returns once it has begun."""
    begun, says = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            subprocess.Popen([sys.executable, __file__, "--sleep"], **quiet)
            os.write(says, b"x")
        os._exit(0)
    os.read(begun, 1)


FORGES = """
import os, sys, time
says, token, work = int(sys.argv[1]), sys.argv[2], os.environ["VERBATIM_WORK_DIR"]
said = f"\\0{token} done 0\\0\\n1000000\\n".encode()
with open(os.path.join(work, "forger"), "w") as file:
    file.write(str(os.getpid()))
with open(os.path.join(work, "forged"), "ab", buffering=0) as count:
    while True:
        os.write(1, said)
        if count.tell() == 0:
            os.write(says, b"x")
        count.write(b"x")
        time.sleep(0.001)
"""


def forge():
    """Leaves a process behind that says again and again, as the shell would, that the program has ended well and that
    its score is a million. Returns once it has said so. Its number is in the file `forger`; the file `forged` has a
    byte for each time."""
    with open(f"/proc/{os.getppid()}/cmdline") as file:
        (token,) = set(re.findall("program-[0-9a-f]{16}", file.read()))
    begun, says = os.pipe()
    forger = [sys.executable, "-c", FORGES, str(says), token]
    subprocess.Popen(forger, start_new_session=True, pass_fds=[says])
    os.read(begun, 1)


def lines():
    for line in sys.stdin:
        order = json.loads(line)
        example = order["example"]
        print("working on", order["id"], flush=True)
        if example.get("how") == "crash":
            sys.exit("it broke")
        if example.get("how") == "hang":
            print("hanging", flush=True)
            time.sleep(10**6)
        while example.get("how") == "held" and not os.path.exists(example["until"]):
            time.sleep(0.01)
        if example.get("how") == "error":
            print(json.dumps({"id": order["id"], "error": "no luck"}), flush=True)
            continue
        reward = play(example, order["base_url"], order["api_key"])
        print(json.dumps({"id": order["id"], "reward": reward, "pid": os.getpid()}), flush=True)
        if example.get("how") == "leaves later":
            time.sleep(0.1)
            sys.exit(0)


if __name__ == "__main__":
    if "--sleep" in sys.argv:
        time.sleep(10**6)
    elif "--lines" in sys.argv:
        lines()
    elif len(sys.argv) > 1:
        with open(sys.argv[1]) as file:
            one(json.load(file))
    else:
        one(json.loads(sys.stdin.readline()))
