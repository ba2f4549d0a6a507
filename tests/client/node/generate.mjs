// A client in another language: health check, then one completion, printed as one JSON line.
//   npm ci && node generate.mjs ../../protos localhost:50051 "Once upon a time" 64

import { fileURLToPath } from "node:url";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const [protos, address, prompt, maxNewTokens] = process.argv.slice(2);
const options = { includeDirs: [protos, fileURLToPath(new URL(".", import.meta.url))], enums: String, longs: String, defaults: true };
const load = (file) => grpc.loadPackageDefinition(protoLoader.loadSync(file, options));
const { DraftService } = load("dynatree/v1/draft.proto").dynatree.v1;
const { Health } = load("health.proto").grpc.health.v1;
const credentials = grpc.credentials.createInsecure();

function checkHealth() {
  const client = new Health(address, credentials);
  return new Promise((resolve, reject) => {
    client.check({ service: "dynatree.v1.DraftService" }, { deadline: Date.now() + 30_000 }, (error, response) => {
      client.close();
      error ? reject(error) : resolve(response.status);
    });
  });
}

async function generate() {
  const client = new DraftService(address, credentials);
  const result = { text: "", tokenIds: [], finishReason: null };
  const request = { text: prompt, maxNewTokens: Number(maxNewTokens ?? 64) };
  for await (const response of client.generate(request, { deadline: Date.now() + 120_000 })) {
    result.text += response.text;
    result.tokenIds.push(...response.tokenIds);
    if (response.completion) result.finishReason = response.completion.finishReason;
  }
  client.close();
  return result;
}

console.log(JSON.stringify({ health: await checkHealth(), ...(await generate()) }));
