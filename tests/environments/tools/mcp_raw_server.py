"""An MCP server over stdio that answers with whatever JSON it is given: tools, and the result of every call."""

import json
import sys

TOOLS, RESULT = json.loads(sys.argv[1])

for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    results = {
        "initialize": {
            "protocolVersion": "2025-06-18",
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "raw", "version": "1"},
        },
        "tools/list": {"tools": TOOLS},
        "tools/call": RESULT,
    }
    found = results.get(asked["method"])
    answer = {"error": {"code": -32601, "message": "no such method"}} if found is None else {"result": found}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
