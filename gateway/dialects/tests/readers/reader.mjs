// How JSON.parse reads bodies. Bodies come and readings go as make.py says.
import { readFileSync } from "node:fs";

const field = (within, name) => {
  if (within === null || typeof within !== "object" || !Object.hasOwn(within, name)) return "absent";
  const value = within[name];
  // JSON.stringify writes Infinity as null.
  return typeof value === "number" ? (Object.is(value, -0) ? "-0" : String(value)) : JSON.stringify(value);
};

const read = ({ surface, body }) => {
  let request;
  try {
    request = JSON.parse(body);
  } catch {
    return { error: true };
  }
  const isChat = surface === "chat";
  const inner = isChat ? request : request.generationConfig;
  return {
    model: field(request, "model"),
    bound: field(inner, isChat ? "max_tokens" : "maxOutputTokens"),
    count: field(inner, isChat ? "n" : "candidateCount"),
    stream: String(Boolean(request.stream)),
  };
};

const rows = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(rows.map(read)));
