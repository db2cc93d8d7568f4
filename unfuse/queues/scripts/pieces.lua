-- Recorded output deltas: a list for each stage, by its task's name.
local function pieces_key(name) return P .. ':pieces:' .. name end

local function count_pieces(name) return try(call, 'LLEN', pieces_key(name)) or 0 end

function verbs.append_deltas()
  local results, counts = {}, {}
  -- All checks before the first effect: a verb changes everything or nothing.
  for i, output in ipairs(A.grown) do
    local name = leased_task(output.claim)
    counts[i] = name and count_pieces(name)
    if name and output.offset > counts[i] then
      return refuse('PROTOCOL output chunks of %s of %s from number %d, but only %d are recorded', output.claim.stage,
        output.claim.request, output.offset, counts[i])
    end
    results[i] = name and 1 or 0
  end

  for i, output in ipairs(A.grown) do
    if counts[i] and output.offset + #output.pieces > counts[i] then
      local id, stage = output.claim.request, output.claim.stage
      local count = call('RPUSH', pieces_key(name_of(id, stage)), unpack(output.pieces, counts[i] - output.offset + 1))
      publish(id, {type = 'appended', stage = stage, attempt = output.claim.attempt, step = count})
    end
  end
  return results
end

function verbs.read_deltas()
  if call('EXISTS', request_key(A.id)) == 0 then return unknown(A.id) end
  return try(call, 'LRANGE', pieces_key(name_of(A.id, A.stage)), A.after, A.after + A.limit - 1) or {}
end
