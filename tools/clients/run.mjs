// What the scripts beside this one share. It prints each library, and what came of each case.
import { readFileSync } from "fs";
export const told = JSON.parse(process.env.CASES);
export const check = (condition, what) => { if (!condition) throw new Error("wrong: " + JSON.stringify(what)); };
export const text = async (stream, of) => { let all = ""; for await (const part of stream) all += of(part); return all; };
export const run = async (library, cases, status) => {
  const found = {};
  for (const [name, [call, refused]] of Object.entries(cases)) {
    try {
      await call();
      found[name] = refused ? `answered, expected a refusal with ${refused}` : "";
    } catch (error) {
      const understood = refused && status(error) === refused && error.message.length > 20;
      found[name] = understood ? "" : `${error.constructor.name} ${status(error)}: ${error.message}`;
    }
  }
  const { version } = JSON.parse(readFileSync(`node_modules/${library}/package.json`));
  console.log("\n" + JSON.stringify([{ library: `${library} (node) ${version}`, cases: found }]));
};
