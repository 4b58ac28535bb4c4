// One scenario of the openai package against a gateway: node client.mjs BASE_URL SCENARIO
// Prints one JSON value, which test_openai_node.py checks.
import OpenAI from "openai";

const [baseURL, scenario] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "two words" }];
const model = "pocketllm";

const scenarios = {
  async answer() {
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 2 });
    const [choice] = answer.choices;
    return { text: choice.message.content, finish: choice.finish_reason, tokens: answer.usage.completion_tokens };
  },

  async stream() {
    const stream = await client.chat.completions.create({
      model,
      messages,
      stream: true,
      stream_options: { include_usage: true },
    });
    let text = "";
    let usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    return { text, tokens: usage.completion_tokens };
  },

  async helper() {
    const stream = client.chat.completions.stream({ model, messages });
    let deltas = "";
    stream.on("content", (delta) => (deltas += delta));
    const final = await stream.finalContent();
    return { deltas, final };
  },

  async responses() {
    const events = [];
    const stream = await client.responses.create({ model, input: "Hello", stream: true });
    for await (const event of stream) events.push(event.type);
    const whole = await client.responses.create({ model, input: "Hello" });
    return { first: events[0], last: events.at(-1), text: whole.output_text };
  },

  async models() {
    const names = [];
    for await (const one of client.models.list()) names.push(one.id);
    return names;
  },

  async error() {
    try {
      await client.chat.completions.create({ model, messages, temperature: 9 });
    } catch (error) {
      return { kind: error.constructor.name, status: error.status, param: error.param, id: Boolean(error.requestID) };
    }
    return null;
  },

  async streamError() {
    const stream = await client.completions.create({ model, prompt: "x", stream: true });
    let text = "";
    try {
      for await (const chunk of stream) text += chunk.choices[0].text;
    } catch (error) {
      return { text, kind: error.constructor.name, message: error.message };
    }
    return null;
  },

  async leave() {
    const stream = await client.completions.create({ model, prompt: "x", stream: true });
    for await (const chunk of stream) {
      stream.controller.abort();
      return chunk.choices[0].text;
    }
    return null;
  },
};

console.log(JSON.stringify(await scenarios[scenario]()));
