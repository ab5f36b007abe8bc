// Ask the site's own search worker: node search.js SITE < queries.json > pages.json
const fs = require('fs')
const path = require('path')
const vm = require('vm')

const site = process.argv[2]
const folder = path.join(site, 'assets/javascripts/workers')
const worker = fs.readdirSync(folder).find((name) => name.endsWith('.min.js'))
let listener, reply
const world = {
  console,
  addEventListener: (_, given) => (listener = given),
  postMessage: (message) => reply(message.data),
}
world.self = world
vm.runInNewContext(fs.readFileSync(path.join(folder, worker), 'utf8'), world)

function ask(type, data) {
  return new Promise((resolve) => {
    reply = resolve
    listener({ data: { type, data } })
  })
}

async function main() {
  const index = JSON.parse(fs.readFileSync(path.join(site, 'search/search_index.json'), 'utf8'))
  await ask(0, { ...index, options: {} }) // set up
  const pages = []
  for (const query of JSON.parse(fs.readFileSync(0, 'utf8'))) {
    const found = await ask(2, query)
    pages.push(found.items.map((group) => group[0].location.split('#')[0]))
  }
  console.log(JSON.stringify(pages))
}

main()
